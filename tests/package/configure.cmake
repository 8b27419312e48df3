# Configures the project SOURCE in an empty folder BINARY with OPTIONS. With a MESSAGE, CMake must fail with text that
# matches. With ANOTHER_LIBTORCH among OPTIONS, LibTorch_ROOT is a copy of LIBTORCH with that version.
file(REMOVE_RECURSE "${BINARY}")
if(OPTIONS MATCHES "ANOTHER_LIBTORCH=([0-9]+)[.]([0-9]+)[.]([0-9]+)")
  set(another "${BINARY}/another_libtorch")
  file(MAKE_DIRECTORY "${another}/include/torch/headeronly" "${another}/include/torch/csrc/api/include/torch")
  file(WRITE "${another}/include/torch/csrc/api/include/torch/torch.h" "")
  file(WRITE "${another}/include/torch/headeronly/version.h" "#define TORCH_VERSION_MAJOR ${CMAKE_MATCH_1}
#define TORCH_VERSION_MINOR ${CMAKE_MATCH_2}\n#define TORCH_VERSION_PATCH ${CMAKE_MATCH_3}\n")
  file(CREATE_LINK "${LIBTORCH}/lib" "${another}/lib" SYMBOLIC)
  list(APPEND OPTIONS "-DLibTorch_ROOT=${another}")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${BINARY}" -G Ninja ${OPTIONS}
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
message("${output}")
string(REGEX REPLACE "[ \n]+" " " output "${output}")  # CMake breaks lines.
if(MESSAGE AND (status EQUAL 0 OR NOT output MATCHES "${MESSAGE}"))
  message(FATAL_ERROR "CMake ended with '${status}' and did not print '${MESSAGE}'")
elseif(NOT MESSAGE AND NOT status EQUAL 0)
  message(FATAL_ERROR "CMake ended with '${status}'")
endif()
