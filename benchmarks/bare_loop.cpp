// What llama.cpp can do with nothing around it: one call a prompt, then all sequences in lockstep, the largest logit each.
// The engine is measured against this.  Same libraries, same context, one ggml threadpool; prints JSON.
//
//   bare_loop MODEL PROMPTS --context 1024 --generate 64 --jobs 3 --threads 2 --poll 1 --unified 1 --flash-attention 1
//
// PROMPTS: a file with one prompt a line, token ids between spaces.  Each line is a sequence.  --context: cells of all
// sequences together.  --stock-attention 1: llama.cpp's own attention kernel instead of the one that Laneway builds in.
#include "ggml-cpu.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#if defined(__GNUC__)
extern "C" __attribute__((weak)) void laneway_ggml_attention_want(int32_t wanted); // not in every build
#endif

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

[[noreturn]] void fail(const std::string &text) {
    std::fprintf(stderr, "bare_loop: %s\n", text.c_str());
    std::exit(1);
}

// Integers that sort as the floats do, so that compilers vectorise the loop.
CLONES int32_t largest_key(const float *values, int32_t count) {
    int32_t largest = INT32_MIN;
    for (int32_t i = 0; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
        largest = key > largest ? key : largest;
    }
    return largest;
}

llama_token argmax(const float *values, int32_t count) {
    constexpr int32_t block = 1024;
    int32_t best = INT32_MIN, where = 0;
    for (int32_t start = 0; start < count; start += block) {
        const int32_t key = largest_key(values + start, std::min(block, count - start));
        if (key > best) {
            best = key;
            where = start;
        }
    }
    for (int32_t i = where;; ++i) {
        if (largest_key(values + i, 1) == best) {
            return i;
        }
    }
}

struct Job {
    double prompt_seconds, decode_seconds;
};

class Loop {
public:
    Loop(llama_model *model, llama_context *context)
        : context(context), vocabulary(llama_model_get_vocab(model)), size(llama_vocab_n_tokens(vocabulary)) {
        for (llama_token token = 0; token < size; ++token) {
            if (llama_vocab_is_eog(vocabulary, token)) {
                ends.push_back(token);
            }
        }
    }

    Job run(const std::vector<std::vector<llama_token>> &prompts, int generate) {
        const int count = static_cast<int>(prompts.size());
        const Clock::time_point start = Clock::now();
        llama_memory_clear(llama_get_memory(context), false);
        answers.assign(prompts.size(), {});
        for (int sequence = 0; sequence < count; ++sequence) {
            const std::vector<llama_token> &prompt = prompts[sequence];
            batch.n_tokens = 0;
            for (size_t i = 0; i < prompt.size(); ++i) {
                add(prompt[i], static_cast<llama_pos>(i), sequence, i + 1 == prompt.size());
            }
            decode();
            answers[sequence].push_back(pick(batch.n_tokens - 1));
        }
        const double prompt_seconds = seconds_since(start);
        const Clock::time_point decoding = Clock::now();
        for (int step = 1; step < generate; ++step) {
            batch.n_tokens = 0;
            for (int sequence = 0; sequence < count; ++sequence) {
                add(answers[sequence].back(), static_cast<llama_pos>(prompts[sequence].size()) + step - 1, sequence, true);
            }
            decode();
            for (int sequence = 0; sequence < count; ++sequence) {
                answers[sequence].push_back(pick(sequence));
            }
        }
        return {prompt_seconds, seconds_since(decoding)};
    }

    std::vector<std::vector<llama_token>> answers;

private:
    void add(llama_token token, llama_pos position, llama_seq_id sequence, bool output) {
        const int32_t i = batch.n_tokens++;
        batch.token[i] = token;
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = output;
    }

    void decode() {
        if (llama_decode(context, batch) != 0) {
            fail("llama_decode failed");
        }
    }

    llama_token pick(int32_t output) {
        float *logits = llama_get_logits_ith(context, output);
        for (llama_token token : ends) {
            logits[token] = -INFINITY; // every answer is as long as it is asked to be
        }
        return argmax(logits, size);
    }

    llama_context *context;
    const llama_vocab *vocabulary;
    int32_t size;
    std::vector<llama_token> ends;
    llama_batch batch = llama_batch_init(4096, 0, 1);
};

std::vector<std::vector<llama_token>> read_prompts(const char *path) {
    std::ifstream file(path);
    std::vector<std::vector<llama_token>> prompts;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::vector<llama_token> prompt;
        for (llama_token token; words >> token;) {
            prompt.push_back(token);
        }
        prompts.push_back(std::move(prompt));
    }
    if (prompts.empty()) {
        fail(std::string("no prompts in ") + path);
    }
    return prompts;
}

} // namespace

int main(int argc, char **argv) {
    std::map<std::string, std::string> options = {
        {"--context", "1024"}, {"--generate", "64"}, {"--jobs", "3"},    {"--threads", "2"},         {"--poll", "1"},
        {"--batch", "512"},    {"--unified", "1"},   {"--whole-window", "1"}, {"--flash-attention", "1"},
        {"--stock-attention", "0"}};
    if (argc < 3) {
        fail("usage: bare_loop MODEL PROMPTS [--option value ...]");
    }
    for (int i = 3; i + 1 < argc; i += 2) {
        if (!options.count(argv[i])) {
            fail(std::string("no such option: ") + argv[i]);
        }
        options[argv[i]] = argv[i + 1];
    }
    const auto number = [&](const char *name) { return std::atoi(options[name].c_str()); };
    const auto prompts = read_prompts(argv[2]);
    const int sequences = static_cast<int>(prompts.size());

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
#if defined(__GNUC__)
    if (number("--stock-attention") && laneway_ggml_attention_want) {
        laneway_ggml_attention_want(0);
    }
#endif
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        fail(std::string("cannot load ") + argv[1]);
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(number("--context"));
    params.n_batch = params.n_ubatch = static_cast<uint32_t>(std::max(number("--batch"), sequences));
    params.n_seq_max = static_cast<uint32_t>(sequences);
    params.n_threads = params.n_threads_batch = number("--threads");
    params.kv_unified = number("--unified") != 0;
    params.flash_attn_type =
        number("--flash-attention") ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.swa_full = number("--whole-window") != 0;
    params.no_perf = true;
    llama_context *context = llama_init_from_model(model, params);
    if (!context) {
        fail("cannot make a context");
    }
    ggml_threadpool_params pool_params = ggml_threadpool_params_default(number("--threads"));
    pool_params.poll = static_cast<uint32_t>(number("--poll"));
    ggml_threadpool *pool = ggml_threadpool_new(&pool_params);
    llama_attach_threadpool(context, pool, pool);

    Loop loop(model, context);
    loop.run(prompts, std::min(8, number("--generate"))); // pages, caches and threads are there from now on
    std::printf("{\"jobs\": [");
    for (int job = 0; job < number("--jobs"); ++job) {
        const Job took = loop.run(prompts, number("--generate"));
        std::printf("%s{\"prompt_seconds\": %.6f, \"decode_seconds\": %.6f, \"seconds\": %.6f}", job ? ", " : "",
                    took.prompt_seconds, took.decode_seconds, took.prompt_seconds + took.decode_seconds);
    }
    std::printf("], \"answers\": [");
    for (size_t i = 0; i < loop.answers.size(); ++i) {
        std::printf("%s[", i ? ", " : "");
        for (size_t t = 0; t < loop.answers[i].size(); ++t) {
            std::printf("%s%d", t ? ", " : "", loop.answers[i][t]);
        }
        std::printf("]");
    }
    std::printf("]}\n");
    llama_free(context);
    ggml_threadpool_free(pool);
    llama_model_free(model);
    return 0;
}
