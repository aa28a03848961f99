// A context, its slots and the step.
#include "model.h"
#include "steps.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <thread>
#include <unistd.h>

using laneway::Failure;
using laneway::guarded;
using laneway::FirstError;
using laneway::Sampler;
using laneway::Scratch;
using laneway::without_speaker;

struct laneway_sampler {
    Sampler sampler;
    int32_t vocabulary; // 0: without a model
    Scratch scratch;
};

namespace {

struct AdapterFree {
    void operator()(llama_adapter_lora *adapter) const { llama_adapter_lora_free(adapter); }
};

struct ContextFree {
    void operator()(llama_context *context) const { llama_free(context); }
};

// The CPU backend may be a library that is loaded at run time, so its functions are asked for by name.
void *cpu_function(const char *name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device) {
        throw Failure(LANEWAY_CONTEXT_FAILED, "this build of llama.cpp has no CPU backend");
    }
    void *function = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
    if (!function) {
        throw Failure(LANEWAY_CONTEXT_FAILED, std::string("the CPU backend has no ") + name);
    }
    return function;
}

struct ThreadpoolFree {
    void operator()(ggml_threadpool *pool) const {
        reinterpret_cast<void (*)(ggml_threadpool *)>(cpu_function("ggml_threadpool_free"))(pool);
    }
};

using Threadpool = std::unique_ptr<ggml_threadpool, ThreadpoolFree>;

Threadpool new_threadpool(int32_t threads, int32_t poll) {
    cpu_function("ggml_threadpool_free"); // so that freeing cannot fail
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = static_cast<uint32_t>(poll);
    auto *create = reinterpret_cast<ggml_threadpool *(*)(ggml_threadpool_params *)>(cpu_function("ggml_threadpool_new"));
    Threadpool pool(create(&params));
    if (!pool) {
        throw Failure(LANEWAY_CONTEXT_FAILED, "no pool of " + std::to_string(threads) + " threads could be made");
    }
    return pool;
}

class Pipe {
public:
    Pipe() {
        if (pipe(ends) != 0) {
            throw Failure(LANEWAY_CONTEXT_FAILED, std::string("no pipe could be made: ") + std::strerror(errno));
        }
        for (int end : ends) {
            fcntl(end, F_SETFD, FD_CLOEXEC);
        }
    }
    Pipe(const Pipe &) = delete;
    ~Pipe() {
        close(ends[0]);
        close(ends[1]);
    }
    int reading_end() const { return ends[0]; }
    void put() {
        const char byte = 0;
        while (write(ends[1], &byte, 1) < 0 && errno == EINTR) {
        }
    }
    void take() {
        char byte;
        while (read(ends[0], &byte, 1) < 0 && errno == EINTR) {
        }
    }

private:
    int ends[2];
};

// The thread that steps run in.  It tells by a pipe that a step is over, for which an event loop can wait as it does for
// sockets: a fifth of what a hop to a Python thread costs, and a step begins and ends without the interpreter's lock.
class StepThread {
public:
    using Run = std::function<int32_t(laneway_batch &, laneway_error *)>;

    explicit StepThread(Run run) : run(std::move(run)), thread([this] { serve(); }) {}

    ~StepThread() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            state = State::leaving;
        }
        changed.notify_all();
        thread.join();
    }

    // Readable from the end of a step until finish().
    int ended() const { return pipe.reading_end(); }

    void begin(laneway_batch *with, laneway_error *error_of) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (state != State::idle) {
                throw Failure(LANEWAY_BAD_ARGUMENT, "a step is under way already");
            }
            batch = with;
            error = error_of;
            state = State::busy;
        }
        changed.notify_all();
    }

    // The status of the step.  Waits for its end, if it has not come.
    int32_t finish() {
        std::unique_lock<std::mutex> lock(mutex);
        if (state == State::idle) {
            return LANEWAY_BAD_ARGUMENT;
        }
        changed.wait(lock, [this] { return state == State::done; });
        pipe.take();
        state = State::idle;
        return status;
    }

private:
    enum class State { idle, busy, done, leaving };

    void serve() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [this] { return state == State::busy || state == State::leaving; });
            if (state == State::leaving) {
                return;
            }
            lock.unlock();
            const int32_t returned = run(*batch, error);
            lock.lock();
            status = returned;
            state = State::done;
            pipe.put();
            changed.notify_all();
        }
    }

    const Run run;
    Pipe pipe;
    std::mutex mutex;
    std::condition_variable changed;
    State state = State::idle;
    laneway_batch *batch = nullptr;
    laneway_error *error = nullptr;
    int32_t status = LANEWAY_OK;
    std::thread thread; // last, for it uses all of the above
};

// Places in grammars that a step looks at, of all its sequences, before it makes the current round its last.
constexpr int64_t most_grammar_work = 1000000;

bool is_raised(void *flag) { return static_cast<std::atomic<bool> *>(flag)->load(std::memory_order_relaxed); }

} // namespace

struct laneway_decoder {
    // Freed from the last to the first: the context before what it uses.
    const laneway_model *model;
    std::vector<std::unique_ptr<llama_adapter_lora, AdapterFree>> adapters;
    Threadpool pool;
    std::atomic<bool> interrupted{false};
    std::atomic<bool> last_round{false};
    std::unique_ptr<llama_context, ContextFree> context;

    llama_memory_t memory = nullptr;
    int32_t slots = 0;
    int32_t vocabulary = 0;
    int32_t most_tokens = 0;
    bool unified = false;
    bool cuttable = false; // every cell stands alone: not so in recurrent and hybrid models
    int32_t window = 0;
    std::vector<std::unique_ptr<Sampler>> samplers; // of each slot; null: not open
    Scratch scratch;
    std::vector<uint8_t> state; // of one slot, kept because fresh memory costs more than the copy

    // The batch, most_tokens long.
    std::vector<llama_pos> positions;
    std::vector<int32_t> one_each;
    std::vector<llama_seq_id> sequences;
    std::vector<llama_seq_id *> sequence_of;
    std::vector<int8_t> outputs;
    std::vector<llama_token> again; // of a later round
    int64_t grammar_work = 0;       // of all sequences, in this step

    std::unique_ptr<StepThread> thread;

    void check_slot(int32_t slot) const {
        if (slot < 0 || slot >= slots) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(slot) + " does not exist; there are " +
                                                    std::to_string(slots), slot);
        }
    }

    int32_t length(int32_t slot) const { return llama_memory_seq_pos_max(memory, slot) + 1; }

    void check_empty(int32_t slot) const {
        if (length(slot) != 0) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(slot) + " still holds " +
                                                    std::to_string(length(slot)) + " tokens; drop it first", slot);
        }
    }

    void clear(int32_t slot) {
        if (!llama_memory_seq_rm(memory, slot, -1, -1)) {
            throw Failure(LANEWAY_BAD_STATE, "the cells of slot " + std::to_string(slot) + " could not be freed", slot);
        }
    }

    // Sliding-window layers forget cells that a sequence needs no more; one that is shorter may need them.
    void check_whole(int32_t slot, int32_t length) const {
        const int32_t first = llama_memory_seq_pos_min(memory, slot);
        if (first > std::max(0, length - std::max(window, 1))) {
            throw Failure(LANEWAY_UNSUPPORTED, "the cells before token " + std::to_string(first) + " of slot " +
                                                   std::to_string(slot) + " are gone: they slid out of the model's window",
                          slot);
        }
    }

    void cut(int32_t slot, int32_t length);
    size_t read_state(int32_t slot);
    void move(int32_t from, int32_t to);
    int32_t add(const laneway_batch &batch);
    int32_t add_round(const laneway_batch &batch, int32_t round);
    void decode(const llama_token *tokens, int32_t total);
    void sample(laneway_batch &batch, int32_t round);
    int32_t step(laneway_batch &batch, laneway_error *error);
};

void laneway_decoder::cut(int32_t slot, int32_t length) {
    const int32_t held = this->length(slot);
    if (length < 1 || length > held) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(slot) + " holds " + std::to_string(held) +
                                                " tokens: the first " + std::to_string(length) + " cannot be kept", slot);
    }
    if (length == held) {
        return;
    }
    if (!cuttable) {
        throw Failure(LANEWAY_UNSUPPORTED, "recurrent and hybrid models cannot keep a part of a sequence", slot);
    }
    check_whole(slot, length);
    if (!llama_memory_seq_rm(memory, slot, length, -1)) {
        throw Failure(LANEWAY_BAD_STATE, "slot " + std::to_string(slot) + " could not be cut", slot);
    }
}

size_t laneway_decoder::read_state(int32_t slot) {
    const size_t size = llama_state_seq_get_size(context.get(), slot);
    if (state.size() < size) {
        state.resize(size);
    }
    const FirstError reason;
    if (llama_state_seq_get_data(context.get(), state.data(), size, slot) != size) {
        throw Failure(LANEWAY_BAD_STATE, "the cells of slot " + std::to_string(slot) + " could not be read: " +
                                             reason.text("llama.cpp gives no reason"), slot);
    }
    return size;
}

void laneway_decoder::move(int32_t from, int32_t to) {
    check_slot(from);
    check_slot(to);
    if (from == to || samplers[to]) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(to) + " is in use: nothing can move there", from);
    }
    check_empty(to);
    if (unified && cuttable) {
        llama_memory_seq_cp(memory, from, to, -1, -1); // within one stream this only relabels cells
    } else if (length(from) > 0) {
        // Faster than seq_cp, which copies the whole stream between streams, used or not.
        const size_t size = read_state(from);
        const FirstError reason;
        if (llama_state_seq_set_data(context.get(), state.data(), size, to) != size) {
            throw Failure(LANEWAY_BAD_STATE, "slot " + std::to_string(from) + " could not be moved: " +
                                                 reason.text("llama.cpp gives no reason"), from);
        }
    }
    clear(from);
    samplers[to] = std::move(samplers[from]);
}

// The first round of a batch: what it has been given.  Returns the tokens in it.
int32_t laneway_decoder::add(const laneway_batch &batch) {
    if (batch.rounds < 1 || batch.rounds > LANEWAY_MOST_ROUNDS) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "a step has 1 to " + std::to_string(LANEWAY_MOST_ROUNDS) + " rounds");
    }
    int32_t total = 0;
    for (int32_t i = 0; i < batch.count; ++i) {
        const int32_t slot = batch.chunks[i].slot;
        check_slot(slot);
        const int32_t count = batch.chunks[i].count;
        if (i > 0 && slot <= batch.chunks[i - 1].slot) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "the chunks of a step must be in ascending order of their slots", slot);
        }
        if (count < 1 || count > most_tokens - total) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "a step takes 1 to " + std::to_string(most_tokens) + " tokens", slot);
        }
        const int32_t position = batch.chunks[i].position;
        if (position != length(slot)) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(slot) + " holds " + std::to_string(length(slot)) +
                                                    " tokens and the chunk begins at " + std::to_string(position), slot);
        }
        if (!samplers[slot]) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(slot) + " is not open", slot);
        }
        if (batch.rounds > 1 && (count != 1 || !batch.chunks[i].sample)) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "a step of several rounds takes one token of each slot and picks one", slot);
        }
        for (int32_t t = 0; t < count; ++t) {
            const int32_t token = batch.tokens[total + t];
            if (token < 0 || token >= vocabulary) {
                throw Failure(LANEWAY_BAD_ARGUMENT, "token " + std::to_string(token) + " is not in the vocabulary", slot);
            }
            positions[total + t] = position + t;
            sequences[total + t] = slot;
            outputs[total + t] = 0;
        }
        total += count;
        outputs[total - 1] = batch.chunks[i].sample != 0;
    }
    return total;
}

// A later round: what the one before it has picked.  Returns the tokens in it, 0 if every sequence has ended.
int32_t laneway_decoder::add_round(const laneway_batch &batch, int32_t round) {
    const int32_t *before = batch.picked + (round - 1) * batch.count;
    int32_t total = 0;
    for (int32_t i = 0; i < batch.count; ++i) {
        if (before[i] < 0 || llama_vocab_is_eog(model->vocabulary, before[i])) {
            continue;
        }
        again[total] = before[i];
        positions[total] = batch.chunks[i].position + round;
        sequences[total] = batch.chunks[i].slot;
        outputs[total] = 1;
        ++total;
    }
    return total;
}

void laneway_decoder::decode(const llama_token *tokens, int32_t total) {
    if (is_raised(&interrupted)) {
        throw Failure(LANEWAY_INTERRUPTED, "the step was interrupted");
    }
    llama_batch native = {};
    native.n_tokens = total;
    native.token = const_cast<llama_token *>(tokens);
    native.pos = positions.data();
    native.n_seq_id = one_each.data();
    native.seq_id = sequence_of.data();
    native.logits = outputs.data();
    const FirstError reason;
    const int32_t status = llama_decode(context.get(), native);
    switch (status) {
    case 0:
        return;
    case LANEWAY_CELLS_FULL:
        throw Failure(LANEWAY_CELLS_FULL, "no free KV cells for " + std::to_string(total) + " tokens");
    case LANEWAY_INTERRUPTED:
        throw Failure(LANEWAY_INTERRUPTED, "the step was interrupted");
    case LANEWAY_BAD_BATCH:
        throw Failure(LANEWAY_BAD_BATCH, reason.text("llama.cpp refused the batch"));
    default:
        throw Failure(status < 0 ? status : LANEWAY_DECODE_FAILED, reason.text("llama_decode failed and gives no reason"));
    }
}

void laneway_decoder::sample(laneway_batch &batch, int32_t round) {
    const int32_t *before = round ? batch.picked + (round - 1) * batch.count : nullptr;
    int32_t *picked = batch.picked + round * batch.count;
    int32_t last = -1;
    for (int32_t i = 0; i < batch.count; ++i) {
        picked[i] = -1;
        if (before && (before[i] < 0 || llama_vocab_is_eog(model->vocabulary, before[i]))) {
            continue;
        }
        last += batch.chunks[i].count;
        if (!batch.chunks[i].sample) {
            continue;
        }
        const int32_t slot = batch.chunks[i].slot;
        float *logits = llama_get_logits_ith(context.get(), last);
        if (!logits) {
            throw Failure(LANEWAY_DECODE_FAILED, "llama.cpp computed no logits", slot);
        }
        try {
            picked[i] = samplers[slot]->pick(logits, vocabulary, scratch, &batch.choices[i]);
        } catch (const Failure &failure) {
            if (failure.code != LANEWAY_NO_TOKEN && failure.code != LANEWAY_GRAMMAR_LIMIT) {
                throw Failure(failure.code, failure.what(), slot);
            }
            // The cells are right, and so are the peers: only this sequence asked for what cannot be had.
            laneway::fail(&batch.failed[i], failure.code, slot, failure.what());
            ++batch.failures;
        }
        grammar_work += samplers[slot]->grammar_work();
    }
}

int32_t laneway_decoder::step(laneway_batch &batch, laneway_error *error) {
    const auto begin = std::chrono::steady_clock::now();
    batch.failures = 0;
    const int32_t status = guarded(error, [&] {
        const std::shared_lock<std::shared_mutex> computing(laneway::steps_under_way());
        for (int32_t i = 0; i < batch.moves; ++i) {
            move(batch.moves_from[i], batch.moves_to[i]);
        }
        if (batch.count > 0) {
            for (int32_t i = 0; i < batch.count; ++i) {
                batch.failed[i].code = LANEWAY_OK;
            }
            decode(batch.tokens, add(batch));
            grammar_work = 0;
            sample(batch, 0);
            int32_t round = 1;
            for (; round < batch.rounds && !is_raised(&last_round) && grammar_work < most_grammar_work; ++round) {
                const int32_t total = add_round(batch, round);
                if (total == 0) {
                    break;
                }
                decode(again.data(), total);
                sample(batch, round);
            }
            batch.rounds = round;
        }
    });
    batch.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return status;
}

extern "C" {

int32_t laneway_sampler_new(const laneway_model *model, const laneway_sampling *sampling, const int32_t *prompt,
                            int32_t prompt_count, laneway_sampler **sampler, laneway_error *error) {
    *sampler = nullptr;
    return guarded(error, [&] {
        *sampler = new laneway_sampler{Sampler(model ? &model->pieces : nullptr, *sampling, prompt, prompt_count),
                                       model ? model->pieces.count() : 0, {}};
    });
}

void laneway_sampler_free(laneway_sampler *sampler) { delete sampler; }

int32_t laneway_sampler_pick(laneway_sampler *sampler, float *logits, int32_t count, laneway_choice *choice,
                             laneway_error *error) {
    return guarded(error, [&] { choice->token = sampler->sampler.pick(logits, count, sampler->scratch, choice); });
}

int32_t laneway_sampler_begins(laneway_sampler *sampler, int32_t *begins, laneway_error *error) {
    return guarded(error, [&] { *begins = sampler->sampler.begins(sampler->vocabulary); });
}

int64_t laneway_sampler_grammar_work(const laneway_sampler *sampler) { return sampler->sampler.grammar_work(); }

int32_t laneway_decoder_new(laneway_model *model, const laneway_options *options, laneway_decoder **decoder,
                            laneway_error *error) {
    *decoder = nullptr;
    return guarded(error, [&] {
        auto made = std::make_unique<laneway_decoder>();
        made->model = model;
        made->slots = options->slots;
        made->vocabulary = llama_vocab_n_tokens(model->vocabulary);
        made->unified = options->unified != 0;
        made->cuttable = !llama_model_is_recurrent(model->model) && !llama_model_is_hybrid(model->model);
        made->window = llama_model_n_swa(model->model);
        // Before the context, which makes its graphs large enough for them.
        std::vector<llama_adapter_lora *> adapters;
        std::vector<float> scales;
        for (int32_t i = 0; i < options->adapters_count; ++i) {
            const FirstError reason;
            made->adapters.emplace_back(llama_adapter_lora_init(model->model, options->adapters[i].path));
            if (!made->adapters.back()) {
                throw Failure(LANEWAY_ADAPTER_FAILED, std::string("adapter '") + options->adapters[i].path + "': " +
                                                          without_speaker(reason.text("llama.cpp gives no reason")));
            }
            adapters.push_back(made->adapters.back().get());
            scales.push_back(options->adapters[i].scale);
        }

        made->pool = new_threadpool(options->threads, options->poll);

        llama_context_params params = llama_context_default_params();
        params.n_ctx = options->context;
        params.n_batch = options->batch;
        params.n_ubatch = options->batch;
        params.n_seq_max = static_cast<uint32_t>(options->slots);
        // A row of logits a slot is all that is needed, and the default would reserve one for every token of a batch.  But
        // llama.cpp lays its buffers out by this number, and with less than 16 rows prompts take a fifth more time.
        params.n_outputs_max = std::max<uint32_t>(params.n_seq_max, 32);
        params.n_threads = options->threads;
        params.n_threads_batch = options->threads;
        params.flash_attn_type = options->flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.type_k = static_cast<ggml_type>(options->type_k);
        params.type_v = static_cast<ggml_type>(options->type_v);
        params.rope_freq_base = options->rope_base;
        params.rope_freq_scale = options->rope_scale;
        params.kv_unified = options->unified != 0;
        params.swa_full = options->whole_window != 0;
        params.no_perf = true;
        params.abort_callback = is_raised;
        params.abort_callback_data = &made->interrupted;
        {
            const FirstError reason;
            made->context.reset(llama_init_from_model(model->model, params));
            if (!made->context) {
                throw Failure(LANEWAY_CONTEXT_FAILED, reason.text("llama.cpp gives no reason"));
            }
        }
        llama_context *context = made->context.get();
        made->memory = llama_get_memory(context);
        if (!made->memory) {
            throw Failure(LANEWAY_UNSUPPORTED, "this model keeps no token memory, so it cannot generate text");
        }
        llama_attach_threadpool(context, made->pool.get(), made->pool.get());

        if (!adapters.empty() && llama_set_adapters_lora(context, adapters.data(), adapters.size(), scales.data()) != 0) {
            throw Failure(LANEWAY_ADAPTER_FAILED, "llama.cpp does not take these adapters together");
        }

        const size_t most = llama_n_batch(context);
        made->most_tokens = static_cast<int32_t>(most);
        made->samplers.resize(static_cast<size_t>(options->slots));
        made->positions.resize(most);
        made->one_each.assign(most, 1);
        made->sequences.resize(most);
        made->outputs.resize(most);
        made->again.resize(static_cast<size_t>(options->slots));
        for (llama_seq_id &sequence : made->sequences) {
            made->sequence_of.push_back(&sequence);
        }
        made->thread = std::make_unique<StepThread>(
            [decoder = made.get()](laneway_batch &batch, laneway_error *of) { return decoder->step(batch, of); });
        *decoder = made.release();
    });
}

void laneway_decoder_free(laneway_decoder *decoder) { delete decoder; }

void laneway_decoder_describe(const laneway_decoder *decoder, laneway_decoder_facts *facts) {
    facts->context = llama_n_ctx(decoder->context.get());
    facts->slot_cells = llama_n_ctx_seq(decoder->context.get());
    facts->batch = llama_n_batch(decoder->context.get());
}

int32_t laneway_decoder_open(laneway_decoder *decoder, int32_t slot, const laneway_sampling *sampling,
                             const int32_t *prompt, int32_t prompt_count, laneway_error *error) {
    return guarded(error, [&] {
        decoder->check_slot(slot);
        if (decoder->samplers[slot]) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(slot) + " is open already; drop it first", slot);
        }
        decoder->samplers[slot] = std::make_unique<Sampler>(&decoder->model->pieces, *sampling, prompt, prompt_count);
    });
}

int32_t laneway_decoder_drop(laneway_decoder *decoder, int32_t slot, laneway_error *error) {
    return guarded(error, [&] {
        decoder->check_slot(slot);
        decoder->samplers[slot].reset();
        decoder->clear(slot);
    });
}

int32_t laneway_decoder_copy(laneway_decoder *decoder, int32_t source, int32_t target, int32_t length,
                             laneway_error *error) {
    return guarded(error, [&] {
        decoder->check_slot(source);
        decoder->check_slot(target);
        if (!decoder->cuttable) {
            throw Failure(LANEWAY_UNSUPPORTED, "recurrent and hybrid models cannot share a part of a sequence", source);
        }
        if (!decoder->unified) {
            throw Failure(LANEWAY_UNSUPPORTED, "sequences share cells only in unified KV mode: load with kv_mode='unified'",
                          source);
        }
        decoder->check_empty(target);
        const int32_t held = decoder->length(source);
        if (source == target || length < 1 || length > held) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "slot " + std::to_string(source) + " holds " + std::to_string(held) +
                                                    " tokens: " + std::to_string(length) + " cannot be copied", source);
        }
        decoder->check_whole(source, length);
        llama_memory_seq_cp(decoder->memory, source, target, 0, length);
    });
}

int32_t laneway_decoder_cut(laneway_decoder *decoder, int32_t slot, int32_t length, laneway_error *error) {
    return guarded(error, [&] {
        decoder->check_slot(slot);
        decoder->samplers[slot].reset();
        decoder->cut(slot, length);
    });
}

int32_t laneway_decoder_shares_prefixes(const laneway_decoder *decoder) {
    return decoder->unified && decoder->cuttable;
}

int32_t laneway_decoder_length(const laneway_decoder *decoder, int32_t slot) {
    return slot < 0 || slot >= decoder->slots ? 0 : decoder->length(slot);
}

int32_t laneway_decoder_is_open(const laneway_decoder *decoder, int32_t slot) {
    return slot >= 0 && slot < decoder->slots && decoder->samplers[slot] != nullptr;
}

int32_t laneway_decoder_begin_step(laneway_decoder *decoder, laneway_batch *batch, laneway_error *error) {
    return guarded(error, [&] { decoder->thread->begin(batch, error); });
}

int32_t laneway_decoder_step_ended(const laneway_decoder *decoder) { return decoder->thread->ended(); }

int32_t laneway_decoder_end_step(laneway_decoder *decoder) { return decoder->thread->finish(); }

void laneway_decoder_interrupt(laneway_decoder *decoder) { decoder->interrupted.store(true); }

void laneway_decoder_end_round(laneway_decoder *decoder) { decoder->last_round.store(true); }

void laneway_decoder_arm(laneway_decoder *decoder) {
    decoder->interrupted.store(false);
    decoder->last_round.store(false);
}

int32_t laneway_decoder_state_get(laneway_decoder *decoder, int32_t slot, const uint8_t **bytes, size_t *size,
                                  laneway_error *error) {
    *bytes = nullptr;
    *size = 0;
    return guarded(error, [&] {
        decoder->check_slot(slot);
        if (decoder->length(slot) > 0) {
            *size = decoder->read_state(slot);
            *bytes = decoder->state.data();
        }
    });
}

int32_t laneway_decoder_state_set(laneway_decoder *decoder, int32_t slot, const uint8_t *bytes, size_t size,
                                  int32_t length, laneway_error *error) {
    return guarded(error, [&] {
        decoder->check_slot(slot);
        decoder->check_empty(slot);
        const FirstError reason;
        const size_t taken = llama_state_seq_set_data(decoder->context.get(), bytes, size, slot);
        if (taken != size) {
            const std::string text = reason.text("llama.cpp did not take all of the state");
            decoder->clear(slot);
            throw Failure(LANEWAY_BAD_STATE, text, slot);
        }
        try {
            decoder->cut(slot, length);
        } catch (const Failure &) {
            decoder->clear(slot);
            throw;
        }
    });
}

} // extern "C"
