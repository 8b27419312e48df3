# Configures and builds the project SOURCE in BINARY with OPTIONS, then runs its program on two ranks
# with LAUNCHER, the `ddpkit` command.
set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} "${COMPILER_LAUNCHER}")
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${BINARY}" -G Ninja ${OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BINARY}" --parallel 2 COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${LAUNCHER}" run -n 2 -- "${BINARY}/outside" 2
  OUTPUT_VARIABLE output RESULT_VARIABLE status TIMEOUT 60)
message("${output}")
if(NOT status EQUAL 0 OR NOT output MATCHES "2 ranks agree")
  message(FATAL_ERROR "${NAME}: the program on two ranks ended with '${status}'")
endif()
