# Sets the common options of ddpkit's targets: C++20, warnings, sanitizer and compiler cache. Projects that link ddpkit
# do not inherit them.

if(PROJECT_IS_TOP_LEVEL)
  find_program(CCACHE_PROGRAM ccache)
  if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # Precompiled headers hit the cache only with this sloppiness, and the unity sources of an outside project only with
    # file_macro. Paths are relative to the source folder, so that clones share the cache.
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
        "CCACHE_SLOPPINESS=pch_defines,time_macros,file_macro,include_file_mtime,include_file_ctime"
        "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${CCACHE_PROGRAM}")
  endif()
endif()

function(ddpkit_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  # __FILE__, which LibTorch's and Catch2's macros use, is a path from the source folder: each clone has the same objects,
  # and hits the compiler cache.
  target_compile_options(${target} PRIVATE "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")
  # Programs need -fPIC too: CMake would give them -fPIE, and no precompiled header would serve both kinds.
  target_compile_options(${target} PRIVATE -fPIC -Wall -Wextra -Wpedantic $<$<BOOL:${DDPKIT_WERROR}>:-Werror>)
  # GCC 14 warns about LibTorch's headers and the standard library, where they are inlined into ddpkit's functions.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 14)
    target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-maybe-uninitialized -Wno-stringop-overflow)
  endif()
  if(DDPKIT_SANITIZER)
    set(flags -fsanitize=${DDPKIT_SANITIZER} -fno-omit-frame-pointer)
    if(DDPKIT_SANITIZER STREQUAL "address")
      list(APPEND flags -fsanitize=undefined -fno-sanitize=vptr)
    endif()
    # A sanitizer's code misleads GCC's flow analysis: it warns about LibTorch's headers. (-Wtsan: they use fences.)
    target_compile_options(${target} PRIVATE ${flags}
      "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-tsan>")
    target_link_options(${target} PUBLIC ${flags})
  endif()
endfunction()

# ddpkit_shared_pch(NAME HEADERS header... [OPTIONS option...] [LIBRARIES target...]) makes the precompiled header NAME.
# A precompiled header takes 40 s of one core, so several targets share it.
function(ddpkit_shared_pch name)
  cmake_parse_arguments(PARSE_ARGV 1 pch "" "" "HEADERS;OPTIONS;LIBRARIES")
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${name}.cpp" CONTENT "")
  add_library(${name} OBJECT "${PROJECT_BINARY_DIR}/${name}.cpp")
  ddpkit_target(${name})
  target_compile_options(${name} PRIVATE -fpch-preprocess ${pch_OPTIONS})
  target_link_libraries(${name} PUBLIC LibTorch::LibTorch Threads::Threads ${pch_LIBRARIES})
  target_precompile_headers(${name} PRIVATE ${pch_HEADERS})
endfunction()

# For targets that include torch/torch.h and are not tests. The header takes 40 s and saves 10 s per object, so
# script/demo's targets do not use it.
function(ddpkit_torch_pch target)
  if(NOT TARGET ddpkit_torch_pch)
    ddpkit_shared_pch(ddpkit_torch_pch HEADERS <torch/torch.h>)
  endif()
  target_compile_options(${target} PRIVATE -fpch-preprocess)
  target_precompile_headers(${target} REUSE_FROM ddpkit_torch_pch)
endfunction()
