# Programs that the benchmark compares with: llama.cpp's own llama-batched-bench, from the same source with the same
# flags and the same libraries, and every C or C++ file in benchmarks/ as a program of its name.  Nothing of this is
# built or installed unless it is asked for:
#
#   cmake -DLANEWAY_BUILD_BENCH=ON build/cp311-...
#   cmake --build build/cp311-... --target laneway-bench      (the programs land in bin/ there)
add_subdirectory("${LANEWAY_LLAMA_PATH}/tools/batched-bench" "${CMAKE_BINARY_DIR}/batched-bench" EXCLUDE_FROM_ALL SYSTEM)
set(bench_programs llama-batched-bench)
foreach(library llama-common llama-batched-bench-impl)
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
endforeach()
# llama.cpp's own folders put their results into bin/, this one inherits nothing from them.
set_target_properties(llama-batched-bench llama-batched-bench-impl PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin"
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")

file(GLOB bench_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/../benchmarks/*.c" "${CMAKE_SOURCE_DIR}/../benchmarks/*.cpp")
foreach(source IN LISTS bench_sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(bench-${name} EXCLUDE_FROM_ALL "${source}")
    target_link_libraries(bench-${name} PRIVATE llama)
    set_target_properties(bench-${name} PROPERTIES
        OUTPUT_NAME ${name}
        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
    list(APPEND bench_programs bench-${name})
endforeach()
add_custom_target(laneway-bench DEPENDS ${bench_programs})
