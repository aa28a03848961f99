# Puts our attention in front of llama.cpp's on the CPU (csrc/ggml/attention.cpp says what it does).
#
# llama.cpp's text stays as it is: its function is compiled under another name, and ours takes the name that the graph's
# executor calls.  Every CPU variant gets both, compiled with that variant's flags.  The switch lies in ggml-base, which
# all variants and the Python module share.
set(attention "${CMAKE_CURRENT_SOURCE_DIR}/csrc/ggml")

target_sources(ggml-base PRIVATE "${attention}/attention_switch.c")

set(attention_variants)
foreach(library IN LISTS LANEWAY_LLAMA_LIBRARIES)
    if(library MATCHES "^ggml-cpu")
        target_sources(${library} PRIVATE "${attention}/attention.cpp")
        list(APPEND attention_variants ${library})
    endif()
endforeach()
# Source properties hold in one directory: each directory that compiles these files calls this.
macro(laneway_attention_properties)
    set_property(SOURCE "${LANEWAY_LLAMA_PATH}/ggml/src/ggml-cpu/ops.cpp" ${ARGN}
        APPEND PROPERTY COMPILE_DEFINITIONS ggml_compute_forward_flash_attn_ext=laneway_stock_flash_attn_ext)
    if(NOT MSVC)
        # a * b + c as one instruction, and no care for errno and traps: plain loops become vector code.
        set_property(SOURCE "${attention}/attention.cpp" ${ARGN}
            APPEND PROPERTY COMPILE_OPTIONS -Wall -Wextra -Wno-unused-function -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math)
        if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
            # Its own header of intrinsics has values that are undefined on purpose.
            set_property(SOURCE "${attention}/attention.cpp" ${ARGN}
                APPEND PROPERTY COMPILE_OPTIONS -Wno-uninitialized -Wno-maybe-uninitialized)
        endif()
    endif()
endmacro()

if(attention_variants)
    laneway_attention_properties(TARGET_DIRECTORY ${attention_variants})
    set(LANEWAY_ATTENTION ON)
endif()
