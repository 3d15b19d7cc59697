# Asks nvcc for its CUDA version and for the GPUs that it supports.

# The oldest version known to compile the kernels.
set(JAX_RING_OLDEST_CUDA 12.4)

# Sets `version`; if the toolkit is unusable, sets `version` to nothing and `why_not` to a sentence.
function(jax_ring_nvcc_version nvcc version why_not)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE failed)
  set(found "")
  if(failed OR NOT said MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${why_not} "${nvcc} does not tell its version, but: ${said}" PARENT_SCOPE)
  elseif(CMAKE_MATCH_1 VERSION_LESS JAX_RING_OLDEST_CUDA)
    set(${why_not} "${nvcc} is of CUDA ${CMAKE_MATCH_1}. The kernels need ${JAX_RING_OLDEST_CUDA} or newer."
        PARENT_SCOPE)
  else()
    set(found ${CMAKE_MATCH_1})
  endif()
  set(${version} "${found}" PARENT_SCOPE)
endfunction()

# If the variable names no GPUs, sets it to machine code for each generation of data-center GPUs that nvcc knows, plus
# PTX for later ones. Refuses a GPU that nvcc does not know, before CMake's test of the compiler fails on it.
function(jax_ring_cuda_architectures nvcc variable)
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE said COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9]+" known "${said}")
  set(chosen "${${variable}}")
  if(NOT chosen)
    foreach(generation 80 90 100)
      if(generation IN_LIST known)
        list(APPEND chosen ${generation}-real)
      endif()
    endforeach()
    string(REGEX REPLACE "-real$" "" chosen "${chosen}")
  endif()
  string(REPLACE ";" ", " known_in_words "${known}")
  if(NOT chosen)
    message(FATAL_ERROR "${nvcc} compiles for none of the architectures 80, 90 and 100, but for ${known_in_words}. "
                        "Name yours in CMAKE_CUDA_ARCHITECTURES.")
  endif()
  foreach(each ${chosen})
    if(each MATCHES "^([0-9]+)" AND NOT CMAKE_MATCH_1 IN_LIST known)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES names ${each}. ${nvcc} compiles for ${known_in_words}.")
    endif()
  endforeach()
  set(${variable} "${chosen}" PARENT_SCOPE)
endfunction()
