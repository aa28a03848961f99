# Provides the target llama, from one of three places: see the options in ../CMakeLists.txt.
#
# Sets LANEWAY_LLAMA_VERSION and LANEWAY_LLAMA_COMMIT (what was built against), LANEWAY_LLAMA_PATH (the source tree) and
# LANEWAY_LLAMA_LIBRARIES (the targets that belong into the wheel; none for the system's llama).

option(LANEWAY_USE_SYSTEM_LLAMA "Use the installed libllama instead of building one" OFF)
option(LANEWAY_BUILD_BENCH "Configure the programs that the benchmark compares with" OFF)
set(LANEWAY_LLAMA_SOURCE_DIR "" CACHE PATH "A llama.cpp checkout to build instead of the pinned source")

set(fetch "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/fetch_llama.py")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${CMAKE_CURRENT_SOURCE_DIR}/fetch_llama.py" "${CMAKE_CURRENT_SOURCE_DIR}/llama_source.toml")

# Runs the fetch script and leaves its JSON in `facts`; its last line is the reason if it fails.
macro(laneway_facts)
    execute_process(COMMAND ${fetch} ${ARGN}
        OUTPUT_VARIABLE facts ERROR_VARIABLE complaint RESULT_VARIABLE result
        ECHO_ERROR_VARIABLE OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
    if(result)
        string(REGEX REPLACE ".*\n" "" complaint "${complaint}")
        # A leading space keeps CMake from breaking the line.
        message(FATAL_ERROR " ${complaint}")
    endif()
endmacro()

set(checkout "${LANEWAY_LLAMA_SOURCE_DIR}")
if(NOT checkout AND DEFINED ENV{LANEWAY_LLAMA_SOURCE})
    set(checkout "$ENV{LANEWAY_LLAMA_SOURCE}")
endif()

if(LANEWAY_USE_SYSTEM_LLAMA)
    include(LanewaySystemLlama)
    return()
endif()

if(checkout)
    get_filename_component(LANEWAY_LLAMA_PATH "${checkout}" ABSOLUTE BASE_DIR "${CMAKE_SOURCE_DIR}/..")
    if(NOT EXISTS "${LANEWAY_LLAMA_PATH}/include/llama.h")
        message(FATAL_ERROR
            " laneway: ${LANEWAY_LLAMA_PATH} is no llama.cpp checkout (include/llama.h is missing); correct LANEWAY_LLAMA_SOURCE, "
            "or unset it to build the pinned source")
    endif()
    set(LANEWAY_LLAMA_COMMIT "unknown")
    find_program(git_program git)
    if(git_program)
        execute_process(COMMAND "${git_program}" -C "${LANEWAY_LLAMA_PATH}" describe --always --abbrev=40 --dirty --exclude "*"
            OUTPUT_VARIABLE described RESULT_VARIABLE result ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(result EQUAL 0)
            set(LANEWAY_LLAMA_COMMIT "${described}")
        endif()
    endif()
    message(STATUS "laneway: llama.cpp from ${LANEWAY_LLAMA_PATH} (${LANEWAY_LLAMA_COMMIT})")
else()
    laneway_facts()
    string(JSON LANEWAY_LLAMA_PATH GET "${facts}" path)
    string(JSON LANEWAY_LLAMA_COMMIT GET "${facts}" commit)
    message(STATUS "laneway: llama.cpp ${LANEWAY_LLAMA_COMMIT} in ${LANEWAY_LLAMA_PATH}")
endif()

set(BUILD_SHARED_LIBS ON)
# The benchmark's programs need it; it is built for them only.
set(LLAMA_BUILD_COMMON ${LANEWAY_BUILD_BENCH} CACHE BOOL "" FORCE)
set(LLAMA_OPENSSL OFF CACHE BOOL "")
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "")
set(LLAMA_BUILD_TOOLS OFF CACHE BOOL "")
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "")
set(LLAMA_BUILD_SERVER OFF CACHE BOOL "")
set(LLAMA_ALL_WARNINGS OFF CACHE BOOL "")
# llama.cpp would ask git, which would answer for whatever repository the tree happens to lie in.
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT "${LANEWAY_LLAMA_COMMIT}")
# ggml's own thread pool: spinning OpenMP threads collapse when cores are shared, waiting ones when they are not.
set(GGML_OPENMP OFF CACHE BOOL "")
set(GGML_CCACHE OFF CACHE BOOL "")
if(GGML_BACKEND_DL OR GGML_CPU_ALL_VARIANTS OR CMAKE_CROSSCOMPILING)
    set(GGML_NATIVE OFF CACHE BOOL "")
else()
    set(GGML_NATIVE ON CACHE BOOL "")
endif()

add_subdirectory("${LANEWAY_LLAMA_PATH}" "${CMAKE_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL SYSTEM)

get_target_property(llama_binary_dir llama BINARY_DIR)
if(EXISTS "${llama_binary_dir}/llama-version.h")
    file(STRINGS "${llama_binary_dir}/llama-version.h" version_line REGEX "LLAMA_VERSION")
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" LANEWAY_LLAMA_VERSION "${version_line}")
else()
    set(LANEWAY_LLAMA_VERSION "unknown")
endif()

set(LANEWAY_LLAMA_LIBRARIES llama ggml ggml-base)
foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)
    # The list outlives a change of options in the cache, so some of its targets may be gone.
    if(TARGET ${backend})
        list(APPEND LANEWAY_LLAMA_LIBRARIES ${backend})
    endif()
endforeach()

foreach(library IN LISTS LANEWAY_LLAMA_LIBRARIES)
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
    set_property(TARGET ${library} PROPERTY PUBLIC_HEADER)
    # Two libllama of different age may meet in one process, and the dynamic linker tells them apart by name alone.
    # Backends that are loaded at run time are searched for by their own name, and keep it.
    get_target_property(kind ${library} TYPE)
    if(NOT kind STREQUAL "MODULE_LIBRARY")
        set_property(TARGET ${library} PROPERTY OUTPUT_NAME "laneway-${library}")
    endif()
    if(library STREQUAL "ggml-base" AND NOT MSVC)
        target_compile_options(${library} PRIVATE
            "$<$<COMPILE_LANGUAGE:C>:SHELL:-include \"${CMAKE_CURRENT_SOURCE_DIR}/cmake/ggml_pages.h\">")
    endif()
    if(library MATCHES "^ggml-cpu" AND NOT MSVC)
        target_compile_options(${library} PRIVATE
            "$<$<COMPILE_LANGUAGE:C>:SHELL:-include \"${CMAKE_CURRENT_SOURCE_DIR}/cmake/ggml_wait.h\">")
    endif()
    if(library MATCHES "^ggml-cpu" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        target_compile_options(${library} PRIVATE
            "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include \"${CMAKE_CURRENT_SOURCE_DIR}/cmake/gcc_amx.h\">")
    endif()
endforeach()

include(LanewayAttention)
