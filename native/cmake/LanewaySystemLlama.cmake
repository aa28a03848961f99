# The system's libllama.  Laneway's C code is written against one version, and llama.cpp promises no stable interface:
# any other version is refused here by name instead of failing, or worse, at run time.
laneway_facts(--facts)
string(JSON wanted_version GET "${facts}" version)

find_package(llama CONFIG QUIET)
if(NOT llama_FOUND)
    message(FATAL_ERROR
        " laneway: LANEWAY_USE_SYSTEM_LLAMA is on, but CMake finds no installed llama.cpp (llama-config.cmake); install its "
        "development files, name its prefix with -C cmake.define.CMAKE_PREFIX_PATH=/prefix, or drop the option")
endif()
if(NOT LLAMA_VERSION STREQUAL wanted_version)
    message(FATAL_ERROR
        " laneway: the system's llama.cpp is version ${LLAMA_VERSION} (${LLAMA_LIB_DIR}), Laneway needs ${wanted_version}; install "
        "that version, or build without LANEWAY_USE_SYSTEM_LLAMA")
endif()

include(CheckTypeSize)
set(CMAKE_REQUIRED_INCLUDES "${LLAMA_INCLUDE_DIR}")
set(CMAKE_EXTRA_INCLUDE_FILES "llama.h")
string(JSON structs GET "${facts}" structs)
string(JSON last LENGTH "${structs}")
math(EXPR last "${last} - 1")
foreach(index RANGE ${last})
    string(JSON name MEMBER "${structs}" ${index})
    string(JSON wanted_size GET "${structs}" "${name}")
    check_type_size("struct ${name}" ${name}_SIZE LANGUAGE C)
    if(CMAKE_SIZEOF_VOID_P EQUAL 8 AND NOT ${name}_SIZE EQUAL wanted_size)
        message(FATAL_ERROR
            " laneway: struct ${name} of the system's llama.h (${LLAMA_INCLUDE_DIR}) has ${${name}_SIZE} bytes, Laneway needs "
            "${wanted_size}; the header is of another build than the version it names: build without LANEWAY_USE_SYSTEM_LLAMA")
    endif()
endforeach()

set(LANEWAY_LLAMA_VERSION "${LLAMA_VERSION}")
set(LANEWAY_LLAMA_COMMIT "${LLAMA_BUILD_COMMIT}")
set(LANEWAY_LLAMA_PATH "${LLAMA_INCLUDE_DIR}")
set(LANEWAY_LLAMA_LIBRARIES)
message(STATUS "laneway: the system's llama.cpp ${LLAMA_VERSION} in ${LLAMA_LIB_DIR}")
