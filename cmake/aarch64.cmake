# Builds for 64-bit Arm with Debian's cross compiler. `script/bootstrap --aarch64` installs it, the libraries and the
# emulator that runs the tests.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)
get_filename_component(LibTorch_ROOT "${CMAKE_CURRENT_LIST_DIR}/../.deps/aarch64" ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH "${LibTorch_ROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
foreach(kind IN ITEMS LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${kind} ONLY)
endforeach()
