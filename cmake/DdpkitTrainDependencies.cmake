# Finds the packages that ddpkit::train links. Sets ddpkit_train_missing to the names of the packages that are not
# found. Skips a package whose target exists, for example from FetchContent.
set(ddpkit_train_missing "")
foreach(ddpkit_package IN ITEMS yaml-cpp nlohmann_json)
  if(NOT TARGET ${ddpkit_package} AND NOT TARGET ${ddpkit_package}::${ddpkit_package})
    find_package(${ddpkit_package} QUIET)
    if(NOT ${ddpkit_package}_FOUND)
      list(APPEND ddpkit_train_missing ${ddpkit_package})
    endif()
  endif()
endforeach()
list(JOIN ddpkit_train_missing ", " ddpkit_train_missing)
