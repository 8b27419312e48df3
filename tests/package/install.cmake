# Installs BUILD into an empty PREFIX. Fails if the package refers to SOURCE or BUILD.
file(REMOVE_RECURSE "${PREFIX}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${PREFIX}"
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE files "${PREFIX}/*Targets*.cmake")
if(NOT files)
  message(FATAL_ERROR "nothing like ddpkitTargets.cmake was installed in ${PREFIX}")
endif()
foreach(file IN LISTS files)
  file(READ "${file}" text)
  foreach(folder IN ITEMS "${SOURCE}/include" "${SOURCE}/src" "${BUILD}")
    # A prefix inside the build folder would look like a reference.
    string(REPLACE "${PREFIX}" "" text "${text}")
    string(FIND "${text}" "${folder}" where)
    if(NOT where EQUAL -1)
      message(FATAL_ERROR "${file} points into ${folder}, which a user of the package does not have")
    endif()
  endforeach()
endforeach()
