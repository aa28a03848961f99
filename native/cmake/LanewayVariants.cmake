# The same for older processors: what is compiled for this one, once more for AVX2 and once for SSE4.2.
#
# `make test-portable` runs the native tests with each.  The targets laneway-avx2 and laneway-sse42 leave in bin/NAME the
# module and all libraries that it loads.  Those without code for one processor are copies.  Nothing of this is built or
# installed unless it is asked for.
if(NOT machine OR NOT TARGET ggml-cpu OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return() # nothing to vary
endif()

laneway_attention_properties(DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")

function(laneway_variant name march)
    set(folder "${CMAKE_BINARY_DIR}/bin/${name}")
    # -mtune: the processor that a compiler tunes for by default, so that only the instructions differ.
    set(options -march=${march} -mtune=generic)

    set(cpu ggml-cpu-${name})
    add_library(${cpu} SHARED EXCLUDE_FROM_ALL)
    get_target_property(place ggml-cpu SOURCE_DIR)
    get_target_property(files ggml-cpu SOURCES)
    foreach(file IN LISTS files)
        cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY "${place}")
        target_sources(${cpu} PRIVATE "${file}")
    endforeach()
    foreach(property COMPILE_DEFINITIONS COMPILE_OPTIONS COMPILE_FEATURES INCLUDE_DIRECTORIES LINK_LIBRARIES LINK_OPTIONS
            C_STANDARD CXX_STANDARD)
        get_target_property(value ggml-cpu ${property})
        if(value)
            list(REMOVE_ITEM value -march=native)
            set_property(TARGET ${cpu} PROPERTY ${property} "${value}")
        endif()
    endforeach()
    # Some of ggml's definitions are its directory's.
    get_property(definitions DIRECTORY "${place}" PROPERTY COMPILE_DEFINITIONS)
    target_compile_definitions(${cpu} PRIVATE ${definitions})
    target_compile_options(${cpu} PRIVATE ${options})
    get_target_property(output ggml-cpu OUTPUT_NAME)
    set_target_properties(${cpu} PROPERTIES
        OUTPUT_NAME "${output}"
        DEFINE_SYMBOL ggml_cpu_EXPORTS
        LIBRARY_OUTPUT_DIRECTORY "${folder}")

    laneway_module(_llama-${name} "${folder}" ${options})
    # One version of each loop, and not those that a loader picks from.
    target_compile_definitions(_llama-${name} PRIVATE LANEWAY_ONE_VARIANT)
    set_target_properties(_llama-${name} PROPERTIES EXCLUDE_FROM_ALL ON)

    set(others ${LANEWAY_LLAMA_LIBRARIES})
    list(REMOVE_ITEM others ggml-cpu)
    set(copied)
    foreach(library IN LISTS others)
        list(APPEND copied COMMAND "${CMAKE_COMMAND}" -E copy_if_different "$<TARGET_FILE:${library}>" "${folder}")
    endforeach()
    add_custom_target(laneway-${name} ${copied} DEPENDS ${cpu} _llama-${name} VERBATIM)
endfunction()

laneway_variant(avx2 haswell)
laneway_variant(sse42 nehalem)
