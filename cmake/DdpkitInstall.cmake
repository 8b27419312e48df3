# Installs the libraries, headers and a package that find_package(ddpkit) reads.
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ddpkit")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/ddpkit" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS ddpkit ddpkit_fmt ddpkit_scaling EXPORT ddpkitTargets)
if(TARGET ddpkit_shared)
  set_target_properties(ddpkit_shared PROPERTIES INSTALL_RPATH "${LibTorch_PREFIX}/lib")
  install(TARGETS ddpkit_shared EXPORT ddpkitTargets)
  # For builds without CMake. Paths are relative to the file: `cmake --install --prefix` may move the package.
  set(pkgconfig_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  file(RELATIVE_PATH prefix_from_pkgconfig "/${pkgconfig_dir}" "/")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/ddpkit.pc.in" "${PROJECT_BINARY_DIR}/ddpkit.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/ddpkit.pc" DESTINATION "${pkgconfig_dir}")
endif()
set(DDPKIT_HAS_TRAIN OFF)
if(TARGET ddpkit_train)
  set(DDPKIT_HAS_TRAIN ON)
  # A separate export: users of ddpkit::ddpkit alone do not need the dependencies of ddpkit::train.
  install(TARGETS ddpkit_train EXPORT ddpkitTrainTargets)
  install(EXPORT ddpkitTrainTargets NAMESPACE ddpkit:: DESTINATION "${package_dir}")
endif()
if(TARGET ddpkit_cli)
  # Set explicitly: INSTALL_RPATH_USE_LINK_PATH omits folders inside the project, such as .deps.
  set_target_properties(ddpkit_cli PROPERTIES INSTALL_RPATH "${LibTorch_PREFIX}/lib")
  install(TARGETS ddpkit_cli)
endif()
install(EXPORT ddpkitTargets NAMESPACE ddpkit:: DESTINATION "${package_dir}")

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/ddpkitConfig.cmake.in" "${PROJECT_BINARY_DIR}/ddpkitConfig.cmake"
  INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ddpkitConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/ddpkitConfig.cmake" "${PROJECT_BINARY_DIR}/ddpkitConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake" "${PROJECT_SOURCE_DIR}/cmake/DdpkitTrainDependencies.cmake"
  DESTINATION "${package_dir}")

# `cpack` in the build folder makes a package. LibTorch comes in no Debian package: FindLibTorch.cmake searches it, and
# the programs load it from its path at build time.
set(CPACK_GENERATOR "DEB;TGZ")
set(CPACK_PACKAGE_CONTACT "ddpkit contributors")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION "libdevel")
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6, libyaml-cpp0.7 | libyaml-cpp0.8")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "nlohmann-json3-dev, libyaml-cpp-dev")
set(CPACK_STRIP_FILES ON)
include(CPack)
