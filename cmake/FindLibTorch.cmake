#[=======================================================================[.rst:
FindLibTorch
------------

Finds LibTorch without its own TorchConfig.cmake, which refuses to load where
no CUDA toolkit is installed. Takes any of

* an unpacked PyPI wheel (``pip install --no-deps --target DIR torch``),
* an unpacked LibTorch zip,
* an installed Python ``torch`` (a virtual environment or site-packages).

Where to look, the first that exists wins: the variable ``LibTorch_ROOT``, the
environment's ``LIBTORCH_ROOT``, ``LibTorch_HINTS``, what ``python3`` imports as
torch. Each may name the folder that holds ``include/`` and ``lib/`` or any of
its usual parents.

Components: ``CUDA`` (libtorch_cuda, with NCCL's header and the CUDA headers of
the NVIDIA wheels or a toolkit).

Targets: ``LibTorch::LibTorch`` (CPU), ``LibTorch::CUDA``.
Variables: ``LibTorch_PREFIX``, ``LibTorch_VERSION``.
#]=======================================================================]

set(_libtorch_probe "include/torch/csrc/api/include/torch/torch.h")

# Expands one path given by the user to the folder with include/ and lib/.
function(_libtorch_expand path out)
  set(candidates "${path}" "${path}/torch" "${path}/libtorch")
  file(GLOB site_packages "${path}/lib/python3*/site-packages/torch"
       "${path}/python3*/site-packages/torch")
  list(APPEND candidates ${site_packages})
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}/${_libtorch_probe}")
      get_filename_component(candidate "${candidate}" REALPATH)
      set(${out} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

if(LibTorch_ROOT)
  _libtorch_expand("${LibTorch_ROOT}" LibTorch_PREFIX)
  if(NOT LibTorch_PREFIX AND NOT LibTorch_FIND_QUIETLY)
    message(WARNING "LibTorch_ROOT is ${LibTorch_ROOT}, but no ${_libtorch_probe} lies there")
  endif()
else()
  set(LibTorch_PREFIX "")
  foreach(_libtorch_path IN ITEMS "$ENV{LIBTORCH_ROOT}" LISTS LibTorch_HINTS)
    if(_libtorch_path AND NOT LibTorch_PREFIX)
      _libtorch_expand("${_libtorch_path}" LibTorch_PREFIX)
    endif()
  endforeach()
  if(NOT LibTorch_PREFIX)
    # find_spec locates the package without importing it. The import would take seconds.
    execute_process(
      COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _libtorch_path OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
      RESULT_VARIABLE _libtorch_status)
    if(_libtorch_status EQUAL 0)
      _libtorch_expand("${_libtorch_path}" LibTorch_PREFIX)
    endif()
  endif()
endif()

if(LibTorch_PREFIX)
  foreach(_libtorch_header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${LibTorch_PREFIX}/include/${_libtorch_header}" AND NOT LibTorch_VERSION)
      file(STRINGS "${LibTorch_PREFIX}/include/${_libtorch_header}" _libtorch_lines
           REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3"
             LibTorch_VERSION "${_libtorch_lines}")
    endif()
  endforeach()
  find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS "${LibTorch_PREFIX}/lib" NO_DEFAULT_PATH NO_CACHE)
  find_library(LibTorch_C10_LIBRARY c10 PATHS "${LibTorch_PREFIX}/lib" NO_DEFAULT_PATH NO_CACHE)

  # The wheel keeps CUDA's libraries and headers in sibling folders of torch/.
  get_filename_component(_libtorch_site "${LibTorch_PREFIX}" DIRECTORY)
  file(GLOB _libtorch_nvidia_libs LIST_DIRECTORIES true "${_libtorch_site}/nvidia/*/lib")
  file(GLOB _libtorch_nvidia_includes LIST_DIRECTORIES true "${_libtorch_site}/nvidia/*/include")

  if(CUDA IN_LIST LibTorch_FIND_COMPONENTS)
    find_library(LibTorch_TORCH_CUDA_LIBRARY torch_cuda PATHS "${LibTorch_PREFIX}/lib" NO_DEFAULT_PATH NO_CACHE)
    find_library(LibTorch_C10_CUDA_LIBRARY c10_cuda PATHS "${LibTorch_PREFIX}/lib" NO_DEFAULT_PATH NO_CACHE)
    find_path(LibTorch_CUDA_INCLUDE_DIR cuda_runtime_api.h
              HINTS ${_libtorch_nvidia_includes} PATHS /usr/local/cuda/include NO_CACHE)
    find_path(LibTorch_NCCL_INCLUDE_DIR nccl.h
              HINTS ${_libtorch_nvidia_includes} PATHS /usr/local/cuda/include NO_CACHE)
    # The wheel's runtime has only a versioned name. find_library does not find versioned names automatically.
    find_library(LibTorch_CUDART_LIBRARY NAMES cudart libcudart.so.13 libcudart.so.12
                 HINTS ${_libtorch_nvidia_libs} "${LibTorch_PREFIX}/lib" PATHS /usr/local/cuda/lib64 NO_CACHE)
    if(LibTorch_TORCH_CUDA_LIBRARY AND LibTorch_C10_CUDA_LIBRARY AND LibTorch_CUDA_INCLUDE_DIR
       AND LibTorch_CUDART_LIBRARY
       AND LibTorch_NCCL_INCLUDE_DIR)
      set(LibTorch_CUDA_FOUND TRUE)
    endif()
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_PREFIX LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY
  VERSION_VAR LibTorch_VERSION HANDLE_COMPONENTS
  REASON_FAILURE_MESSAGE "script/bootstrap installs one, or pass -DLibTorch_ROOT=FOLDER")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_C10_LIBRARY}")
  add_library(LibTorch::torch_cpu SHARED IMPORTED)
  set_target_properties(LibTorch::torch_cpu PROPERTIES IMPORTED_LOCATION "${LibTorch_CPU_LIBRARY}")
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch INTERFACE
    "${LibTorch_PREFIX}/include" "${LibTorch_PREFIX}/include/torch/csrc/api/include")
  target_link_libraries(LibTorch::LibTorch INTERFACE LibTorch::torch_cpu LibTorch::c10)
  # libtorch_cpu.so needs CUDA's runtime and CUPTI. Its own rpath finds them at run time, ours at link time.
  foreach(_libtorch_path IN LISTS _libtorch_nvidia_libs ITEMS "${LibTorch_PREFIX}/lib")
    target_link_options(LibTorch::LibTorch INTERFACE "LINKER:-rpath-link,${_libtorch_path}")
  endforeach()
endif()

if(LibTorch_CUDA_FOUND AND NOT TARGET LibTorch::CUDA)
  add_library(LibTorch::c10_cuda SHARED IMPORTED)
  set_target_properties(LibTorch::c10_cuda PROPERTIES IMPORTED_LOCATION "${LibTorch_C10_CUDA_LIBRARY}")
  add_library(LibTorch::torch_cuda SHARED IMPORTED)
  set_target_properties(LibTorch::torch_cuda PROPERTIES IMPORTED_LOCATION "${LibTorch_TORCH_CUDA_LIBRARY}")
  add_library(LibTorch::cudart SHARED IMPORTED)
  set_target_properties(LibTorch::cudart PROPERTIES IMPORTED_LOCATION "${LibTorch_CUDART_LIBRARY}")
  add_library(LibTorch::CUDA INTERFACE IMPORTED)
  target_include_directories(LibTorch::CUDA INTERFACE
    "${LibTorch_CUDA_INCLUDE_DIR}" "${LibTorch_NCCL_INCLUDE_DIR}" ${_libtorch_nvidia_includes})
  # Its kernels register when the library loads. A linker that drops the library as unneeded would silently disable
  # CUDA.
  target_link_libraries(LibTorch::CUDA INTERFACE LibTorch::LibTorch
    "-Wl,--no-as-needed" LibTorch::torch_cuda LibTorch::c10_cuda "-Wl,--as-needed" LibTorch::cudart)
endif()
