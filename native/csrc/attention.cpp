// The switch between our attention and llama.cpp's, and one operation on its own for tests and measurements.
#include "border.h"
#include "steps.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>

#ifdef LANEWAY_ATTENTION
#include "ggml/attention_switch.h"
#endif

using laneway::Failure;
using laneway::guarded;

namespace {

struct ContextFree {
    void operator()(ggml_context *context) const { ggml_free(context); }
};
struct BackendFree {
    void operator()(ggml_backend *backend) const { ggml_backend_free(backend); }
};
struct BufferFree {
    void operator()(ggml_backend_buffer *buffer) const { ggml_backend_buffer_free(buffer); }
};

} // namespace

std::shared_mutex &laneway::steps_under_way() {
    static std::shared_mutex mutex;
    return mutex;
}

extern "C" {

#ifdef LANEWAY_ATTENTION

int32_t laneway_attention(int32_t wanted) {
    if (wanted == 0 || wanted == 1) {
        const std::unique_lock<std::shared_mutex> lock(laneway::steps_under_way());
        laneway_ggml_attention_want(wanted);
    }
    return laneway_ggml_attention_wanted();
}

int64_t laneway_attention_count(void) { return laneway_ggml_attention_counted(); }

#else

int32_t laneway_attention(int32_t) { return -1; }

int64_t laneway_attention_count(void) { return 0; }

#endif

int32_t laneway_attention_run(const laneway_attention_case *given, float *out, double *seconds, laneway_error *error) {
    return guarded(error, [&] {
        const ggml_type type = static_cast<ggml_type>(given->type);
        const int64_t size = given->size, heads = given->heads, heads_kv = given->heads_kv, rows = given->rows;
        const int64_t cells = given->cells, capacity = given->capacity, streams = given->streams;
        if (size < 1 || heads_kv < 1 || heads % heads_kv != 0 || rows < 1 || cells < 1 || capacity < cells || streams < 1 ||
            given->threads < 1 || given->repeats < 1 || given->type < 0 || given->type >= GGML_TYPE_COUNT ||
            size % ggml_blck_size(type) != 0) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "these sizes do not fit together");
        }
        std::unique_ptr<ggml_backend, BackendFree> backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
        ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        if (!backend || !device) {
            throw Failure(LANEWAY_UNSUPPORTED, "this build of llama.cpp has no CPU backend");
        }
        const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
        if (!set_threads) {
            throw Failure(LANEWAY_UNSUPPORTED, "the CPU backend does not let its threads be counted");
        }
        set_threads(backend.get(), given->threads);

        ggml_init_params params = {};
        params.mem_size = 32 * ggml_tensor_overhead() + ggml_graph_overhead();
        params.no_alloc = true;
        const std::unique_ptr<ggml_context, ContextFree> owner(ggml_init(params));
        ggml_context *context = owner.get();
        if (!context) {
            throw std::bad_alloc();
        }
        // As llama.cpp has them: heads beside each other, seen as a dimension of their own.
        ggml_tensor *q = ggml_new_tensor_4d(context, GGML_TYPE_F32, size, heads, rows, streams);
        ggml_tensor *k = ggml_new_tensor_4d(context, type, size, heads_kv, capacity, streams);
        ggml_tensor *v = ggml_new_tensor_4d(context, type, size, heads_kv, capacity, streams);
        ggml_tensor *mask = given->mask ? ggml_new_tensor_4d(context, GGML_TYPE_F16, cells, rows, 1, streams) : nullptr;
        ggml_tensor *sinks = given->sinks ? ggml_new_tensor_1d(context, GGML_TYPE_F32, heads) : nullptr;
        const auto seen = [&](ggml_tensor *kv) {
            ggml_tensor *part = ggml_view_4d(context, kv, size, heads_kv, cells, streams, kv->nb[1], kv->nb[2], kv->nb[3], 0);
            return ggml_permute(context, part, 0, 2, 1, 3);
        };
        ggml_tensor *result = ggml_flash_attn_ext(context, ggml_permute(context, q, 0, 2, 1, 3), seen(k), seen(v), mask,
                                                  given->scale, given->max_bias, given->cap);
        ggml_flash_attn_ext_add_sinks(result, sinks);
        ggml_cgraph *graph = ggml_new_graph(context);
        ggml_build_forward_expand(graph, result);

        const std::unique_ptr<ggml_backend_buffer, BufferFree> buffer(ggml_backend_alloc_ctx_tensors(context, backend.get()));
        if (!buffer) {
            throw std::bad_alloc();
        }
        std::memcpy(q->data, given->q, ggml_nbytes(q));
        std::memcpy(k->data, given->k, ggml_nbytes(k));
        std::memcpy(v->data, given->v, ggml_nbytes(v));
        if (mask) {
            std::memcpy(mask->data, given->mask, ggml_nbytes(mask));
        }
        if (sinks) {
            std::memcpy(sinks->data, given->sinks, ggml_nbytes(sinks));
        }
        for (int32_t i = 0; i < given->repeats; ++i) {
            const std::shared_lock<std::shared_mutex> lock(laneway::steps_under_way());
            const auto begin = std::chrono::steady_clock::now();
            if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
                throw Failure(LANEWAY_DECODE_FAILED, "the graph could not be computed");
            }
            seconds[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
        std::memcpy(out, result->data, ggml_nbytes(result));
    });
}

} // extern "C"
