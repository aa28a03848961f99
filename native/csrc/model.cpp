// Loading a model, its facts, and text to tokens and back.
#include "model.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>

using laneway::Failure;
using laneway::guarded;
using laneway::FirstError;

namespace {

struct Loading {
    const int32_t *cancelled;
    float *progress;
};

bool on_progress(float progress, void *data) {
    const auto *loading = static_cast<const Loading *>(data);
    *loading->progress = progress;
    return __atomic_load_n(loading->cancelled, __ATOMIC_RELAXED) == 0;
}

// Writes those of all tokens that `wanted` names, `size` of them at most, and returns how many there are.
template <typename Wanted>
int32_t tokens_that(const laneway_model *model, int32_t *tokens, int32_t size, Wanted wanted) {
    int32_t found = 0;
    const int32_t count = llama_vocab_n_tokens(model->vocabulary);
    for (int32_t token = 0; token < count; ++token) {
        if (wanted(token)) {
            if (found < size) {
                tokens[found] = token;
            }
            ++found;
        }
    }
    return found;
}

} // namespace

extern "C" {

int32_t laneway_model_load(const char *path, int32_t gpu_layers, int32_t load_mode, const int32_t *cancelled,
                           float *progress, laneway_model **model, laneway_error *error) {
    *model = nullptr;
    return guarded(error, [&] {
        Loading loading = {cancelled, progress};
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = gpu_layers;
        params.load_mode = load_mode == 0 ? LLAMA_LOAD_MODE_NONE : load_mode == 1 ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_AUTO;
        params.progress_callback = on_progress;
        params.progress_callback_user_data = &loading;
        const FirstError reason;
        llama_model *loaded = llama_model_load_from_file(path, params);
        if (!loaded) {
            if (__atomic_load_n(cancelled, __ATOMIC_RELAXED)) {
                throw Failure(LANEWAY_LOAD_CANCELLED, "the load was cancelled");
            }
            throw Failure(LANEWAY_LOAD_FAILED, reason.text("llama.cpp gives no reason"));
        }
        std::unique_ptr<llama_model, decltype(&llama_model_free)> owned(loaded, llama_model_free);
        *model = new laneway_model(loaded);
        owned.release();
    });
}

void laneway_model_free(laneway_model *model) {
    if (model) {
        llama_model_free(model->model);
        delete model;
    }
}

void laneway_model_describe(const laneway_model *model, laneway_model_facts *facts) {
    const llama_model *m = model->model;
    const llama_vocab *v = model->vocabulary;
    facts->tensor_bytes = llama_model_size(m);
    facts->parameters = llama_model_n_params(m);
    facts->vocabulary = llama_vocab_n_tokens(v);
    facts->context_train = llama_model_n_ctx_train(m);
    facts->embedding = llama_model_n_embd(m);
    facts->layers = llama_model_n_layer(m);
    facts->heads = llama_model_n_head(m);
    facts->heads_kv = llama_model_n_head_kv(m);
    facts->window = llama_model_n_swa(m);
    facts->recurrent = llama_model_is_recurrent(m);
    facts->hybrid = llama_model_is_hybrid(m);
    facts->encoder = llama_model_has_encoder(m);
    facts->decoder = llama_model_has_decoder(m);
    facts->diffusion = llama_model_is_diffusion(m);
    facts->vocabulary_type = static_cast<int32_t>(llama_vocab_type(v));
    facts->bos = llama_vocab_bos(v);
    facts->eos = llama_vocab_eos(v);
    facts->adds_bos = llama_vocab_get_add_bos(v);
}

const char *laneway_model_template(const laneway_model *model) { return llama_model_chat_template(model->model, nullptr); }

const char *laneway_model_token_text(const laneway_model *model, int32_t token) {
    if (token < 0 || token >= llama_vocab_n_tokens(model->vocabulary)) {
        return nullptr;
    }
    return llama_vocab_get_text(model->vocabulary, token);
}

int32_t laneway_model_metadata_count(const laneway_model *model) { return llama_model_meta_count(model->model); }

int32_t laneway_model_metadata_key(const laneway_model *model, int32_t index, char *text, size_t size) {
    return llama_model_meta_key_by_index(model->model, index, text, size);
}

int32_t laneway_model_metadata_value(const laneway_model *model, int32_t index, char *text, size_t size) {
    return llama_model_meta_val_str_by_index(model->model, index, text, size);
}

int32_t laneway_model_end_tokens(const laneway_model *model, int32_t *tokens, int32_t size) {
    return tokens_that(model, tokens, size, [&](int32_t token) { return llama_vocab_is_eog(model->vocabulary, token); });
}

int32_t laneway_model_user_defined(const laneway_model *model, int32_t *tokens, int32_t size) {
    return tokens_that(model, tokens, size, [&](int32_t token) {
        return (llama_vocab_get_attr(model->vocabulary, token) & LLAMA_TOKEN_ATTR_USER_DEFINED) != 0;
    });
}

int32_t laneway_tokenize(const laneway_model *model, const char *text, int32_t length, const laneway_rules *given,
                         const uint8_t *flag, int32_t **tokens, int32_t *count, int32_t *calls, laneway_error *error) {
    *tokens = nullptr;
    *count = *calls = 0;
    return guarded(error, [&] {
        laneway::Rules rules;
        rules.everywhere = given->everywhere != 0;
        for (int32_t index = 0; index < given->spans; ++index) {
            rules.written.push_back({static_cast<uint32_t>(given->begins[index]), static_cast<uint32_t>(given->ends[index])});
        }
        for (int32_t index = 0; index < given->markers_count; ++index) {
            const int32_t token = given->markers[index];
            rules.markers.resize(llama_vocab_n_tokens(model->vocabulary));
            if (token >= 0 && token < llama_vocab_n_tokens(model->vocabulary)) {
                rules.markers[token] = true;
            }
        }
        const laneway::Stop stop(flag);
        const std::vector<int32_t> found = model->tokenizing.run(text, static_cast<uint32_t>(length), rules, stop, calls);
        if (found.size() > INT32_MAX) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "the text has more than 2147483647 tokens");
        }
        *tokens = static_cast<int32_t *>(std::malloc(std::max<size_t>(found.size(), 1) * sizeof(int32_t)));
        if (!*tokens) {
            throw std::bad_alloc();
        }
        std::copy(found.begin(), found.end(), *tokens);
        *count = static_cast<int32_t>(found.size());
    });
}

void laneway_tokens_free(int32_t *tokens) { std::free(tokens); }

int32_t laneway_least_tokens(const laneway_model *model, const char *text, size_t length, int64_t *least,
                             laneway_error *error) {
    *least = 0;
    return guarded(error, [&] { *least = model->tokenizing.least(text, length); });
}

int32_t laneway_count_specials(const laneway_model *model, const char *text, size_t length, int32_t most, int32_t *count,
                               laneway_error *error) {
    *count = 0;
    return guarded(error, [&] { *count = model->tokenizing.count_specials(text, length, most); });
}

int32_t laneway_llama_tokenize(const laneway_model *model, const char *text, int32_t length, int32_t special,
                               int32_t *tokens, int32_t size, int32_t *count, laneway_error *error) {
    *count = 0;
    return guarded(error, [&] {
        const int32_t n = llama_tokenize(model->vocabulary, text, length, tokens, size, false, special != 0);
        if (n == INT32_MIN) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "the text has more than 2147483647 tokens");
        }
        *count = n < 0 ? -n : n;
    });
}

int32_t laneway_piece(const laneway_model *model, int32_t token, int32_t special, char *text, int32_t size,
                      int32_t *count, laneway_error *error) {
    *count = 0;
    return guarded(error, [&] {
        if (token < 0 || token >= llama_vocab_n_tokens(model->vocabulary)) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "token " + std::to_string(token) + " is not in the vocabulary");
        }
        const int32_t n = llama_token_to_piece(model->vocabulary, token, text, size, 0, special != 0);
        *count = n < 0 ? -n : n;
    });
}

} // extern "C"
