# A project outside ddpkit's tree, with a program app.
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES CXX)
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/app.cpp" "#include <ddpkit/version.h>\nint main() {}\n")
add_executable(app "${CMAKE_CURRENT_BINARY_DIR}/app.cpp")
# The block.
