// Training of LoRA adapters: the forward and the backward pass of one model over a few sequences, and AdamW.
//
// The graph is built here rather than differentiated by ggml, so that it holds nothing that has no backward pass, that
// sequences of any length lie beside each other without padding, that logits exist only for tokens that count, and that
// quantised matrices are passed backwards in blocks.  Forward it is llama.cpp's graph of the same architecture.
#include "border.h"
#include "training_kernels.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

using laneway::AttentionShape;
using laneway::Failure;
using laneway::guarded;
using laneway::LossRows;
using laneway::Segment;

namespace {

constexpr int module_count = 7;
constexpr const char *module_names[module_count] = {"attn_q",   "attn_k", "attn_v",  "attn_output",
                                                    "ffn_gate", "ffn_up", "ffn_down"};
enum Module { Q, K, V, O, GATE, UP, DOWN };

// Rows of logits that exist at once: they are the widest thing there is.
constexpr int64_t head_rows = 128;
// Tensors of the adapter begin at multiples of this many numbers.
constexpr int64_t padding = 16;

struct Architecture {
    const char *name;
    int rope;         // ggml's number of the way that pairs of numbers are turned
    bool head_norms;  // queries and keys are normed head by head
    int without_rope; // every so many layers one does not turn; 0: all do
};

constexpr Architecture architectures[] = {
    {"llama", 0, false, 0},
    {"qwen2", GGML_ROPE_TYPE_NEOX, false, 0},
    {"qwen3", GGML_ROPE_TYPE_NEOX, true, 0},
    {"smollm3", 0, false, 4},
};

struct GgufFree {
    void operator()(gguf_context *context) const { gguf_free(context); }
};
struct ContextFree {
    void operator()(ggml_context *context) const { ggml_free(context); }
};
struct BackendFree {
    void operator()(ggml_backend *backend) const { ggml_backend_free(backend); }
};
struct BufferFree {
    void operator()(ggml_backend_buffer *buffer) const { ggml_backend_buffer_free(buffer); }
};
struct AllocatorFree {
    void operator()(ggml_gallocr *allocator) const { ggml_gallocr_free(allocator); }
};
using Context = std::unique_ptr<ggml_context, ContextFree>;
using Buffer = std::unique_ptr<ggml_backend_buffer, BufferFree>;

Context new_context(size_t tensors, size_t graph = 0) {
    ggml_init_params params = {};
    params.mem_size = tensors * ggml_tensor_overhead() + (graph ? ggml_graph_overhead_custom(graph, false) : 0);
    params.no_alloc = true;
    Context context(ggml_init(params));
    if (!context) {
        throw std::bad_alloc();
    }
    return context;
}

[[noreturn]] void refuse(const std::string &text) { throw Failure(LANEWAY_UNSUPPORTED, text); }

// Whether a matrix of this type can be had as F32, which is all that training asks of it.
bool can_unpack(ggml_type type) {
    return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

class File {
public:
    explicit File(const char *path) {
        const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
        struct stat facts = {};
        if (descriptor < 0 || fstat(descriptor, &facts) != 0) {
            const std::string reason = std::strerror(errno);
            if (descriptor >= 0) {
                close(descriptor);
            }
            throw Failure(LANEWAY_LOAD_FAILED, "the model file cannot be opened: " + reason);
        }
        size = static_cast<size_t>(facts.st_size);
        void *mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
        const std::string reason = std::strerror(errno);
        close(descriptor);
        if (mapped == MAP_FAILED) {
            throw Failure(LANEWAY_LOAD_FAILED, "the model file cannot be mapped: " + reason);
        }
        data = static_cast<char *>(mapped);
    }
    ~File() { munmap(data, size); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    // Pages that were read once and are not needed again.
    void forget(const char *from, size_t count) const {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t begin = (static_cast<size_t>(from - data) + page - 1) / page * page;
        const size_t end = static_cast<size_t>(from - data + static_cast<ptrdiff_t>(count)) / page * page;
        if (end > begin) {
            madvise(data + begin, end - begin, MADV_DONTNEED);
        }
    }

    char *data = nullptr;
    size_t size = 0;
};

class Metadata {
public:
    explicit Metadata(gguf_context *given) : gguf(given) {
        const int64_t id = find("general.architecture", GGUF_TYPE_STRING);
        if (id < 0) {
            refuse("the file does not name its architecture");
        }
        architecture = gguf_get_val_str(gguf, id);
    }

    uint32_t whole(const char *key, int64_t otherwise) const {
        const std::string name = architecture + "." + key;
        const int64_t id = gguf_find_key(gguf, name.c_str());
        if (id < 0) {
            if (otherwise < 0) {
                refuse("the file does not say " + name);
            }
            return static_cast<uint32_t>(otherwise);
        }
        switch (gguf_get_kv_type(gguf, id)) {
        case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf, id);
        case GGUF_TYPE_INT32: return static_cast<uint32_t>(gguf_get_val_i32(gguf, id));
        case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf, id);
        case GGUF_TYPE_UINT64: return static_cast<uint32_t>(gguf_get_val_u64(gguf, id));
        default: refuse(name + " differs between layers, which training does not know");
        }
    }

    float number(const char *key, float otherwise) const {
        const int64_t id = find(architecture + "." + key, GGUF_TYPE_FLOAT32);
        return id < 0 ? otherwise : gguf_get_val_f32(gguf, id);
    }

    std::string text(const char *key) const {
        const int64_t id = find(architecture + "." + key, GGUF_TYPE_STRING);
        return id < 0 ? "" : gguf_get_val_str(gguf, id);
    }

    std::string architecture;

private:
    int64_t find(const std::string &key, gguf_type type) const {
        const int64_t id = gguf_find_key(gguf, key.c_str());
        if (id >= 0 && gguf_get_kv_type(gguf, id) != type) {
            refuse(key + " is not of type " + gguf_type_name(type));
        }
        return id;
    }

    gguf_context *gguf;
};

// y = weight x + bias + scale * b (a x)
struct Linear {
    ggml_tensor *weight = nullptr;
    ggml_tensor *bias = nullptr;
    ggml_tensor *a = nullptr, *b = nullptr;
    ggml_tensor *a_gradient = nullptr, *b_gradient = nullptr;
};

struct Layer {
    Linear linear[module_count];
    ggml_tensor *attention_norm = nullptr, *feed_norm = nullptr;
    ggml_tensor *q_norm = nullptr, *k_norm = nullptr;
    bool turns = true;
};

// What the backward pass of a layer reads of its forward pass.
struct Kept {
    ggml_tensor *in, *q_flat, *k_flat, *q, *k, *v, *attended, *middle, *gate, *up;
    ggml_tensor *inner[module_count]; // scale * a x
};

struct Parameter {
    std::string name;
    ggml_tensor *tensor, *gradient;
    int64_t offset;
};

ggml_tensor *custom(ggml_context *context, int64_t columns, int64_t rows, std::initializer_list<ggml_tensor *> sources,
                    ggml_custom_op_t function, void *data = nullptr) {
    std::vector<ggml_tensor *> given(sources);
    return ggml_custom_4d(context, GGML_TYPE_F32, columns, rows, 1, 1, given.data(), static_cast<int>(given.size()), function,
                          GGML_N_TASKS_MAX, data);
}

ggml_tensor *in_place(ggml_context *context, ggml_tensor *target, std::initializer_list<ggml_tensor *> sources,
                      ggml_custom_op_t function, void *data = nullptr) {
    std::vector<ggml_tensor *> given(sources);
    return ggml_custom_inplace(context, target, given.data(), static_cast<int>(given.size()), function, GGML_N_TASKS_MAX, data);
}

// ggml would round what quantised matrices are multiplied with, and is slow with many tokens; of F32 it is as fast as this.
ggml_tensor *product(ggml_context *context, ggml_tensor *matrix, ggml_tensor *given) {
    return custom(context, matrix->ne[1], given->ne[1], {matrix, given}, laneway::pass_through);
}

void *const not_yet = reinterpret_cast<void *>(uintptr_t{64}); // memory of tensors while a graph is only measured

} // namespace

struct laneway_trainer {
    explicit laneway_trainer(const laneway_training &wanted);
    void load();
    void run(laneway_pass &pass);
    void update(laneway_update &update);

    laneway_trainer_facts facts = {};
    std::vector<Parameter> parameters;
    float *numbers[4] = {}; // as laneway_trainer_numbers has them

private:
    struct Pass {
        Context context;
        ggml_cgraph *graph;
        ggml_tensor *tokens, *positions, *rows;
    };

    ggml_tensor *matrix(const std::string &name, int64_t columns, int64_t rows, bool always_mapped = false);
    ggml_tensor *vector(const std::string &name, int64_t count, bool needed);
    void read_shape();
    void read_tensors();
    void add_adapter(Linear &linear, const std::string &name);
    Pass build(int64_t tokens, int64_t predictions, bool learn);
    ggml_tensor *turned(ggml_context *c, ggml_tensor *x, ggml_tensor *positions, bool back) const;
    ggml_tensor *forward(ggml_context *c, const Linear &linear, ggml_tensor *x, ggml_tensor **inner) const;
    ggml_tensor *inner_of(ggml_context *c, const Linear &linear, ggml_tensor *x) const;
    ggml_tensor *backward(ggml_context *c, ggml_cgraph *graph, const Linear &linear, ggml_tensor *x, ggml_tensor *inner,
                          ggml_tensor *gradient, ggml_tensor *so_far, bool wanted) const;
    ggml_tensor *layer_forward(Pass &pass, const Layer &layer, ggml_tensor *x, Kept &kept, bool again = false) const;
    ggml_tensor *layer_backward(Pass &pass, const Layer &layer, const Kept &kept, ggml_tensor *gradient, bool wanted) const;
    ggml_tensor *normed(ggml_context *c, ggml_tensor *x, ggml_tensor *weight) const;

    laneway_training options;
    std::string path;
    std::unique_ptr<gguf_context, GgufFree> gguf;
    Context file_tensors;
    Context weights, adapter;
    std::set<std::string> known; // tensors of the file that training has a use for
    struct Copy {
        ggml_tensor *from, *to;
    };
    std::vector<Copy> copies;
    std::vector<ggml_tensor *> mapped;

    const Architecture *architecture = nullptr;
    int64_t embedding = 0, heads = 0, heads_kv = 0, head_size = 0, feed = 0, vocabulary = 0;
    float epsilon = 0, rope_base = 0, rope_scale = 0;
    int context_train = 0;
    float scale = 0;
    AttentionShape attention = {};

    std::vector<Layer> layers;
    ggml_tensor *embeddings = nullptr, *output = nullptr, *output_norm = nullptr, *rope_factors = nullptr;

    std::unique_ptr<File> file;
    Buffer file_buffer, copy_buffer, state_buffer;
    std::unique_ptr<ggml_backend, BackendFree> backend;
    std::unique_ptr<ggml_gallocr, AllocatorFree> allocator;

    // Of the pass under way; the graph's operations read them.
    std::vector<Segment> segments;
    std::vector<int32_t> targets;
    std::vector<double> losses;
    std::vector<LossRows> loss_rows;
};

// ---- what is in the file

laneway_trainer::laneway_trainer(const laneway_training &wanted) : options(wanted), path(wanted.path) {
    options.path = nullptr;
    if (options.threads < 1 || options.rank < 1 || options.most_tokens < 1 || options.modules == 0 ||
        options.modules >> module_count != 0 || !(options.alpha > 0)) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "these settings make no adapter");
    }
    const laneway::FirstError reason;
    ggml_context *tensors = nullptr;
    gguf_init_params params = {};
    params.no_alloc = true;
    params.ctx = &tensors;
    gguf.reset(gguf_init_from_file(path.c_str(), params));
    file_tensors.reset(tensors);
    if (!gguf) {
        throw Failure(LANEWAY_LOAD_FAILED, reason.text("the model file cannot be read"));
    }
    read_shape();
    read_tensors();

    // As if everything had its place already: what is left is what a pass needs.
    for (const Context *context : {&weights, &adapter}) {
        for (ggml_tensor *t = ggml_get_first_tensor(context->get()); t; t = ggml_get_next_tensor(context->get(), t)) {
            t->data = not_yet;
        }
    }
    // Every one of the tokens is attended to by all, and every prediction counts.
    const Pass pass = build(options.most_tokens, options.most_tokens, true);
    size_t size = 0;
    allocator.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
    ggml_gallocr_reserve_n_size(allocator.get(), pass.graph, nullptr, nullptr, &size);
    allocator.reset();
    facts.activations = size;
    for (const Copy &copy : copies) {
        facts.copied += ggml_nbytes(copy.to);
    }
    for (const ggml_tensor *t : mapped) {
        facts.mapped += ggml_nbytes(t);
    }
    facts.state = 4 * sizeof(float) * static_cast<uint64_t>(facts.numbers);
    facts.tensors = static_cast<int32_t>(parameters.size());
    facts.layers = static_cast<int32_t>(layers.size());
    facts.vocabulary = static_cast<int32_t>(vocabulary);
    facts.context_train = context_train;
}

void laneway_trainer::read_shape() {
    const Metadata metadata(gguf.get());
    for (const Architecture &each : architectures) {
        if (metadata.architecture == each.name) {
            architecture = &each;
        }
    }
    if (!architecture) {
        std::string known;
        for (const Architecture &each : architectures) {
            known += known.empty() ? each.name : std::string(", ") + each.name;
        }
        refuse("models of architecture " + metadata.architecture + " cannot be trained; those of " + known + " can");
    }
    if (metadata.whole("expert_count", 0) != 0) {
        refuse("models with experts cannot be trained");
    }
    const std::string scaling = metadata.text("rope.scaling.type");
    if (!scaling.empty() && scaling != "none" && scaling != "linear") {
        refuse("training does not know rope scaling of type " + scaling);
    }
    if (metadata.number("rope.scaling.attn_factor", 1.0f) != 1.0f || metadata.number("attention.clamp_kqv", 0.0f) != 0.0f) {
        refuse("training does not know the way in which this model scales or clamps its attention");
    }
    embedding = metadata.whole("embedding_length", -1);
    feed = metadata.whole("feed_forward_length", -1);
    heads = metadata.whole("attention.head_count", -1);
    heads_kv = metadata.whole("attention.head_count_kv", heads);
    if (heads < 1 || heads_kv < 1 || heads % heads_kv != 0) {
        refuse("the heads of this model do not fit together");
    }
    head_size = metadata.whole("attention.key_length", embedding / heads);
    if (metadata.whole("attention.value_length", head_size) != head_size ||
        metadata.whole("rope.dimension_count", head_size) != head_size) {
        refuse("training knows only keys, values and rotations of one size");
    }
    epsilon = metadata.number("attention.layer_norm_rms_epsilon", 1e-5f);
    rope_base = metadata.number("rope.freq_base", 10000.0f);
    const float factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0f));
    rope_scale = factor == 0.0f || scaling == "none" ? 1.0f : 1.0f / factor;
    context_train = static_cast<int>(metadata.whole("context_length", -1));
    const float given = metadata.number("attention.scale", 0.0f);
    // Only these two architectures read it.
    const bool reads = metadata.architecture == "llama" || metadata.architecture == "smollm3";
    scale = options.alpha / static_cast<float>(options.rank);
    attention.size = head_size;
    attention.heads = heads;
    attention.heads_kv = heads_kv;
    attention.scale = given == 0.0f || !reads ? 1.0f / std::sqrt(static_cast<float>(head_size)) : given;
    attention.segments = &segments;
    layers.resize(metadata.whole("block_count", -1));
}

ggml_tensor *laneway_trainer::matrix(const std::string &name, int64_t columns, int64_t rows, bool always_mapped) {
    ggml_tensor *found = ggml_get_tensor(file_tensors.get(), name.c_str());
    if (!found) {
        refuse("training finds no tensor " + name + " in the file");
    }
    if (found->ne[0] != columns || found->ne[1] != rows || ggml_nrows(found) != rows) {
        refuse("tensor " + name + " has another shape than training expects");
    }
    if (!can_unpack(found->type)) {
        std::string others;
        for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
            if (can_unpack(static_cast<ggml_type>(type))) {
                others += (others.empty() ? "" : ", ") + std::string(ggml_type_name(static_cast<ggml_type>(type)));
            }
        }
        refuse("tensor " + name + " is of type " + ggml_type_name(found->type) +
               ", which cannot be trained with; those of " + others + " can");
    }
    const bool copied = options.copies && found->type != GGML_TYPE_F32 && !always_mapped;
    ggml_tensor *made = ggml_new_tensor_2d(weights.get(), copied ? GGML_TYPE_F32 : found->type, columns, rows);
    ggml_set_name(made, name.c_str());
    if (copied) {
        copies.push_back({found, made});
    } else {
        mapped.push_back(made);
    }
    known.insert(name);
    return made;
}

ggml_tensor *laneway_trainer::vector(const std::string &name, int64_t count, bool needed) {
    ggml_tensor *found = ggml_get_tensor(file_tensors.get(), name.c_str());
    if (!found && !needed) {
        return nullptr;
    }
    if (!found || found->ne[0] != count || ggml_nelements(found) != count || found->type != GGML_TYPE_F32) {
        refuse("training needs a tensor " + name + " of " + std::to_string(count) + " numbers in F32");
    }
    ggml_tensor *made = ggml_new_tensor_1d(weights.get(), GGML_TYPE_F32, count);
    ggml_set_name(made, name.c_str());
    mapped.push_back(made);
    known.insert(name);
    return made;
}

void laneway_trainer::add_adapter(Linear &linear, const std::string &name) {
    const auto add = [&](const char *suffix, int64_t columns, int64_t rows, ggml_tensor *&tensor, ggml_tensor *&gradient) {
        tensor = ggml_new_tensor_2d(adapter.get(), GGML_TYPE_F32, columns, rows);
        gradient = ggml_new_tensor_2d(adapter.get(), GGML_TYPE_F32, columns, rows);
        parameters.push_back({name + suffix, tensor, gradient, facts.numbers});
        facts.parameters += columns * rows;
        facts.numbers += (columns * rows + padding - 1) / padding * padding;
    };
    add(".lora_a", linear.weight->ne[0], options.rank, linear.a, linear.a_gradient);
    add(".lora_b", options.rank, linear.weight->ne[1], linear.b, linear.b_gradient);
}

void laneway_trainer::read_tensors() {
    weights = new_context(layers.size() * 18 + 8);
    adapter = new_context(layers.size() * module_count * 4 + 1);
    ggml_tensor *table = ggml_get_tensor(file_tensors.get(), "token_embd.weight");
    vocabulary = table ? table->ne[1] : 0;
    // Rows of it are looked up, in whatever type they are.
    embeddings = matrix("token_embd.weight", embedding, vocabulary, true);
    output_norm = vector("output_norm.weight", embedding, true);
    rope_factors = architecture->rope == 0 && architecture->without_rope == 0 ? vector("rope_freqs.weight", head_size / 2, false)
                                                                              : nullptr;
    if (ggml_get_tensor(file_tensors.get(), "output.weight")) {
        output = matrix("output.weight", embedding, vocabulary);
    } else {
        // The same table serves at both ends.
        output = options.copies ? matrix("token_embd.weight", embedding, vocabulary) : embeddings;
    }
    const int64_t q = heads * head_size, kv = heads_kv * head_size;
    const int64_t columns[module_count] = {embedding, embedding, embedding, q, embedding, embedding, feed};
    const int64_t rows[module_count] = {q, kv, kv, embedding, feed, feed, embedding};
    for (size_t i = 0; i < layers.size(); ++i) {
        Layer &layer = layers[i];
        const std::string block = "blk." + std::to_string(i) + ".";
        layer.turns = architecture->without_rope == 0 || (i + 1) % static_cast<size_t>(architecture->without_rope) != 0;
        layer.attention_norm = vector(block + "attn_norm.weight", embedding, true);
        layer.feed_norm = vector(block + "ffn_norm.weight", embedding, true);
        if (architecture->head_norms) {
            layer.q_norm = vector(block + "attn_q_norm.weight", head_size, true);
            layer.k_norm = vector(block + "attn_k_norm.weight", head_size, true);
        }
        for (int m = 0; m < module_count; ++m) {
            const std::string name = block + module_names[m];
            layer.linear[m].weight = matrix(name + ".weight", columns[m], rows[m]);
            layer.linear[m].bias = vector(name + ".bias", rows[m], false);
            if (options.modules >> m & 1) {
                add_adapter(layer.linear[m], name + ".weight");
            }
        }
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); ++i) {
        const char *name = gguf_get_tensor_name(gguf.get(), i);
        if (!known.count(name)) {
            refuse(std::string("the model has a tensor ") + name + ", with which training does not know what to do");
        }
    }
}

// ---- the graph

ggml_tensor *laneway_trainer::normed(ggml_context *c, ggml_tensor *x, ggml_tensor *weight) const {
    return ggml_mul(c, ggml_rms_norm(c, x, epsilon), weight);
}

ggml_tensor *laneway_trainer::turned(ggml_context *c, ggml_tensor *x, ggml_tensor *positions, bool back) const {
    const auto turn = back ? ggml_rope_ext_back : ggml_rope_ext;
    return turn(c, x, positions, rope_factors, static_cast<int>(head_size), architecture->rope, context_train, rope_base,
                rope_scale, 0.0f, 1.0f, 32.0f, 1.0f);
}

ggml_tensor *laneway_trainer::forward(ggml_context *c, const Linear &linear, ggml_tensor *x, ggml_tensor **inner) const {
    ggml_tensor *y = product(c, linear.weight, x);
    *inner = inner_of(c, linear, x);
    if (*inner) {
        y = ggml_add(c, y, ggml_mul_mat(c, linear.b, *inner));
    }
    return linear.bias ? ggml_add(c, y, linear.bias) : y;
}

ggml_tensor *laneway_trainer::inner_of(ggml_context *c, const Linear &linear, ggml_tensor *x) const {
    return linear.a ? ggml_scale(c, ggml_mul_mat(c, linear.a, x), scale) : nullptr;
}

// Adds to the gradients of the adapter; returns so_far with what comes from here, if that is wanted.
ggml_tensor *laneway_trainer::backward(ggml_context *c, ggml_cgraph *graph, const Linear &linear, ggml_tensor *x,
                                       ggml_tensor *inner, ggml_tensor *gradient, ggml_tensor *so_far, bool wanted) const {
    ggml_tensor *t = nullptr;
    if (linear.a) {
        t = ggml_scale(c, custom(c, options.rank, gradient->ne[1], {linear.b, gradient}, laneway::back_through), scale);
        ggml_build_forward_expand(graph, in_place(c, linear.a_gradient, {x, t}, laneway::add_outer));
        ggml_build_forward_expand(graph, in_place(c, linear.b_gradient, {inner, gradient}, laneway::add_outer_transposed));
    }
    if (!wanted) {
        return nullptr;
    }
    ggml_tensor *out = nullptr;
    if (so_far) {
        out = t ? in_place(c, so_far, {linear.weight, gradient, linear.a, t}, laneway::back_through)
                : in_place(c, so_far, {linear.weight, gradient}, laneway::back_through);
    } else {
        const int64_t columns = linear.weight->ne[0], rows = gradient->ne[1];
        out = t ? custom(c, columns, rows, {linear.weight, gradient, linear.a, t}, laneway::back_through)
                : custom(c, columns, rows, {linear.weight, gradient}, laneway::back_through);
    }
    ggml_build_forward_expand(graph, out);
    return out;
}

// again: for the sake of what the backward pass reads only; there is no result then.
ggml_tensor *laneway_trainer::layer_forward(Pass &pass, const Layer &layer, ggml_tensor *x, Kept &kept, bool again) const {
    ggml_context *c = pass.context.get();
    const int64_t tokens = x->ne[1];
    const auto by_head = [&](ggml_tensor *t, int64_t count) { return ggml_reshape_3d(c, t, head_size, count, tokens); };
    kept = {};
    kept.in = x;
    ggml_tensor *h = normed(c, x, layer.attention_norm);
    kept.q_flat = by_head(forward(c, layer.linear[Q], h, &kept.inner[Q]), heads);
    kept.k_flat = by_head(forward(c, layer.linear[K], h, &kept.inner[K]), heads_kv);
    kept.v = by_head(forward(c, layer.linear[V], h, &kept.inner[V]), heads_kv);
    kept.q = layer.q_norm ? normed(c, kept.q_flat, layer.q_norm) : kept.q_flat;
    kept.k = layer.k_norm ? normed(c, kept.k_flat, layer.k_norm) : kept.k_flat;
    if (layer.turns) {
        kept.q = turned(c, kept.q, pass.positions, false);
        kept.k = turned(c, kept.k, pass.positions, false);
    }
    kept.attended = custom(c, heads * head_size, tokens, {kept.q, kept.k, kept.v}, laneway::attend,
                           const_cast<AttentionShape *>(&attention));
    kept.middle = ggml_add(c, x, forward(c, layer.linear[O], kept.attended, &kept.inner[O]));
    h = normed(c, kept.middle, layer.feed_norm);
    kept.gate = forward(c, layer.linear[GATE], h, &kept.inner[GATE]);
    kept.up = forward(c, layer.linear[UP], h, &kept.inner[UP]);
    h = ggml_swiglu_split(c, kept.gate, kept.up);
    if (again) {
        kept.inner[DOWN] = inner_of(c, layer.linear[DOWN], h);
        return nullptr;
    }
    h = ggml_add(c, kept.middle, forward(c, layer.linear[DOWN], h, &kept.inner[DOWN]));
    ggml_build_forward_expand(pass.graph, h);
    return h;
}

ggml_tensor *laneway_trainer::layer_backward(Pass &pass, const Layer &layer, const Kept &kept, ggml_tensor *gradient,
                                             bool wanted) const {
    ggml_context *c = pass.context.get();
    ggml_cgraph *graph = pass.graph;
    const int64_t tokens = gradient->ne[1];
    const auto part = [&](ggml_tensor *t, int64_t columns, int64_t at) {
        return ggml_view_2d(c, t, columns, tokens, t->nb[1], static_cast<size_t>(at) * sizeof(float));
    };
    // Norms and products that are quick to compute are computed anew: kept, they would be a third of all that is.
    ggml_tensor *h = ggml_swiglu_split(c, kept.gate, kept.up);
    ggml_tensor *d = backward(c, graph, layer.linear[DOWN], h, kept.inner[DOWN], gradient, nullptr, true);
    ggml_tensor *both = custom(c, 2 * feed, tokens, {kept.gate, kept.up, d}, laneway::swiglu_back);
    h = normed(c, kept.middle, layer.feed_norm);
    d = backward(c, graph, layer.linear[GATE], h, kept.inner[GATE], part(both, feed, 0), nullptr, true);
    d = backward(c, graph, layer.linear[UP], h, kept.inner[UP], part(both, feed, feed), d, true);
    d = ggml_rms_norm_back(c, ggml_mul(c, d, layer.feed_norm), kept.middle, epsilon);
    gradient = ggml_add(c, gradient, d);

    d = backward(c, graph, layer.linear[O], kept.attended, kept.inner[O], gradient, nullptr, true);
    const int64_t q = heads * head_size, kv = heads_kv * head_size;
    ggml_tensor *all = custom(c, q + 2 * kv, tokens, {kept.q, kept.k, kept.v, d}, laneway::attend_back,
                              const_cast<AttentionShape *>(&attention));
    const auto through_norm = [&](int64_t count, int64_t at, ggml_tensor *flat, ggml_tensor *norm) {
        ggml_tensor *g = ggml_view_3d(c, all, head_size, count, tokens, static_cast<size_t>(head_size) * sizeof(float),
                                      all->nb[1], static_cast<size_t>(at) * sizeof(float));
        if (layer.turns) {
            g = turned(c, g, pass.positions, true);
        }
        if (norm) {
            g = ggml_rms_norm_back(c, ggml_mul(c, g, norm), flat, epsilon);
        }
        return ggml_is_contiguous(g) ? ggml_reshape_2d(c, g, head_size * count, tokens)
                                     : ggml_view_2d(c, g, head_size * count, tokens, g->nb[2], 0);
    };
    ggml_tensor *q_gradient = through_norm(heads, 0, kept.q_flat, layer.q_norm);
    ggml_tensor *k_gradient = through_norm(heads_kv, q, kept.k_flat, layer.k_norm);
    h = normed(c, kept.in, layer.attention_norm);
    d = backward(c, graph, layer.linear[Q], h, kept.inner[Q], q_gradient, nullptr, wanted);
    d = backward(c, graph, layer.linear[K], h, kept.inner[K], k_gradient, d, wanted);
    d = backward(c, graph, layer.linear[V], h, kept.inner[V], part(all, kv, q + kv), d, wanted);
    if (!wanted) {
        return nullptr;
    }
    d = ggml_rms_norm_back(c, ggml_mul(c, d, layer.attention_norm), kept.in, epsilon);
    gradient = ggml_add(c, gradient, d);
    ggml_build_forward_expand(graph, gradient);
    return gradient;
}

laneway_trainer::Pass laneway_trainer::build(int64_t tokens, int64_t predictions, bool learn) {
    const size_t nodes = layers.size() * (options.recompute ? 256 : 192) + 64 + 16 * static_cast<size_t>(predictions / head_rows + 1);
    Pass pass = {new_context(2 * nodes, nodes), nullptr, nullptr, nullptr, nullptr};
    ggml_context *c = pass.context.get();
    pass.graph = ggml_new_graph_custom(c, nodes, false);
    const auto input = [&](int64_t count) {
        ggml_tensor *t = ggml_new_tensor_1d(c, GGML_TYPE_I32, count);
        ggml_set_input(t);
        return t;
    };
    pass.tokens = input(tokens);
    pass.positions = input(tokens);
    pass.rows = input(predictions);

    std::vector<Kept> kept(layers.size());
    ggml_tensor *x = ggml_get_rows(c, embeddings, pass.tokens);
    for (size_t i = 0; i < layers.size(); ++i) {
        x = layer_forward(pass, layers[i], x, kept[i]);
    }

    // The head, for some of the predictions at a time.
    ggml_tensor *gradient = nullptr;
    const int64_t chunks = (predictions + head_rows - 1) / head_rows;
    loss_rows.assign(static_cast<size_t>(chunks), LossRows{});
    for (int64_t i = 0; i < chunks; ++i) {
        const int64_t begin = i * head_rows, count = std::min(head_rows, predictions - begin);
        ggml_tensor *rows = ggml_view_1d(c, pass.rows, count, static_cast<size_t>(begin) * sizeof(int32_t));
        ggml_tensor *last = ggml_get_rows(c, x, rows);
        ggml_tensor *logits = product(c, output, normed(c, last, output_norm));
        ggml_tensor *d = in_place(c, logits, {}, laneway::cross_entropy, &loss_rows[static_cast<size_t>(i)]);
        if (learn) {
            d = custom(c, embedding, count, {output, d}, laneway::back_through);
            d = ggml_rms_norm_back(c, ggml_mul(c, d, output_norm), last, epsilon);
            d = gradient ? in_place(c, gradient, {d, rows}, laneway::spread_rows)
                         : custom(c, embedding, tokens, {d, rows}, laneway::spread_rows);
            gradient = d;
        }
        ggml_build_forward_expand(pass.graph, d);
    }
    for (size_t i = layers.size(); learn && i-- > 0;) {
        if (options.recompute) {
            layer_forward(pass, layers[i], kept[i].in, kept[i], true);
        }
        gradient = layer_backward(pass, layers[i], kept[i], gradient, i > 0);
    }
    return pass;
}

// ---- memory

void laneway_trainer::load() {
    if (backend) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "the trainer was loaded before");
    }
    for (const Context *context : {&weights, &adapter}) {
        for (ggml_tensor *t = ggml_get_first_tensor(context->get()); t; t = ggml_get_next_tensor(context->get(), t)) {
            t->data = nullptr;
        }
    }
    file = std::make_unique<File>(path.c_str());
    const size_t data = gguf_get_data_offset(gguf.get());
    const auto place_of = [&](const char *name) {
        const int64_t id = gguf_find_tensor(gguf.get(), name);
        const size_t offset = data + gguf_get_tensor_offset(gguf.get(), id), size = gguf_get_tensor_size(gguf.get(), id);
        if (offset > file->size || size > file->size - offset) {
            throw Failure(LANEWAY_LOAD_FAILED, std::string("the file ends before tensor ") + name);
        }
        return file->data + offset;
    };
    const auto put = [](const Buffer &buffer, ggml_tensor *t, void *where) {
        if (ggml_backend_tensor_alloc(buffer.get(), t, where) != GGML_STATUS_SUCCESS) {
            throw Failure(LANEWAY_EXCEPTION, std::string("tensor ") + t->name + " does not lie in its memory");
        }
    };
    file_buffer.reset(ggml_backend_cpu_buffer_from_ptr(file->data, file->size));
    for (ggml_tensor *t : mapped) {
        put(file_buffer, t, place_of(t->name));
    }
    if (!copies.empty()) {
        // Everything else in this context has its place already.
        copy_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), ggml_backend_cpu_buffer_type()));
        if (!copy_buffer) {
            throw std::bad_alloc();
        }
        for (const Copy &copy : copies) {
            const char *from = place_of(copy.to->name);
            const ggml_type_traits *traits = ggml_get_type_traits(copy.from->type);
            const size_t row = ggml_row_size(copy.from->type, copy.from->ne[0]);
            for (int64_t i = 0; i < copy.from->ne[1]; ++i) {
                traits->to_float(from + static_cast<size_t>(i) * row,
                                 static_cast<float *>(copy.to->data) + i * copy.to->ne[0], copy.from->ne[0]);
            }
            file->forget(from, ggml_nbytes(copy.from));
        }
    }

    const size_t bytes = static_cast<size_t>(facts.numbers) * sizeof(float);
    state_buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 4 * bytes));
    if (!state_buffer) {
        throw std::bad_alloc();
    }
    ggml_backend_buffer_clear(state_buffer.get(), 0);
    for (size_t i = 0; i < 4; ++i) {
        numbers[i] = static_cast<float *>(ggml_backend_buffer_get_base(state_buffer.get())) + i * bytes / sizeof(float);
    }
    laneway::Random random(options.seed);
    for (const Parameter &each : parameters) {
        put(state_buffer, each.tensor, numbers[0] + each.offset);
        put(state_buffer, each.gradient, numbers[3] + each.offset);
        if (each.name.back() == 'a') {
            // The other factor is zero, so that the adapter begins by changing nothing.
            const double width = 1.0 / std::sqrt(static_cast<double>(each.tensor->ne[0]));
            float *values = numbers[0] + each.offset;
            for (int64_t i = 0; i < ggml_nelements(each.tensor); ++i) {
                values[i] = static_cast<float>((2.0 * random.next() - 1.0) * width);
            }
        }
    }

    backend.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto set_threads = device ? reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
                                          ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"))
                                    : nullptr;
    if (!backend || !set_threads) {
        refuse("this build of llama.cpp has no CPU backend that training could use");
    }
    set_threads(backend.get(), options.threads);

    allocator.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
    const Pass pass = build(options.most_tokens, options.most_tokens, true);
    if (!ggml_gallocr_reserve(allocator.get(), pass.graph)) {
        throw std::bad_alloc();
    }
}

// ---- training

void laneway_trainer::run(laneway_pass &given) {
    if (!backend) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "the trainer was not loaded");
    }
    segments.clear();
    targets.clear();
    std::vector<int32_t> tokens, positions, rows;
    int64_t at = 0;
    for (int32_t i = 0; i < given.sequences; ++i) {
        const int64_t length = given.lengths[i];
        if (length < 2) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "a sequence of fewer than 2 tokens predicts nothing");
        }
        // The last token is only predicted.
        segments.push_back({static_cast<int64_t>(tokens.size()), static_cast<int64_t>(tokens.size()) + length - 1});
        for (int64_t n = 0; n < length; ++n) {
            const int32_t token = given.tokens[at + n];
            if (token < 0 || token >= vocabulary) {
                throw Failure(LANEWAY_BAD_ARGUMENT, "token " + std::to_string(token) + " is not in the vocabulary");
            }
            if (n > 0 && given.counted[at + n]) {
                rows.push_back(static_cast<int32_t>(tokens.size()) - 1);
                targets.push_back(token);
            }
            if (n + 1 < length) {
                tokens.push_back(token);
                positions.push_back(static_cast<int32_t>(n));
            }
        }
        at += length;
    }
    if (targets.empty() || static_cast<int64_t>(tokens.size()) > options.most_tokens) {
        throw Failure(LANEWAY_BAD_ARGUMENT, targets.empty() ? "no prediction of these sequences counts"
                                                            : "more tokens than the trainer was made for");
    }
    losses.assign(targets.size(), 0.0);

    const Pass pass = build(static_cast<int64_t>(tokens.size()), static_cast<int64_t>(rows.size()), given.learn != 0);
    for (size_t i = 0; i < loss_rows.size(); ++i) {
        const size_t begin = i * static_cast<size_t>(head_rows);
        loss_rows[i] = {targets.data() + begin, losses.data() + begin, static_cast<float>(given.weight), given.learn != 0};
    }
    if (!ggml_gallocr_alloc_graph(allocator.get(), pass.graph)) {
        throw std::bad_alloc();
    }
    const auto fill = [](ggml_tensor *t, const std::vector<int32_t> &values) {
        if (t->data) { // nothing turns by positions in a model without rotation
            std::memcpy(t->data, values.data(), values.size() * sizeof(int32_t));
        }
    };
    fill(pass.tokens, tokens);
    fill(pass.positions, positions);
    fill(pass.rows, rows);
    if (ggml_backend_graph_compute(backend.get(), pass.graph) != GGML_STATUS_SUCCESS) {
        throw Failure(LANEWAY_EXCEPTION, "the pass could not be computed");
    }
    given.loss = 0.0;
    for (const double loss : losses) {
        given.loss += loss;
    }
    given.predictions = static_cast<int64_t>(losses.size());
}

void laneway_trainer::update(laneway_update &update) {
    if (!backend || update.step < 1) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "there is nothing to update");
    }
    float *const adapter_numbers = numbers[0], *const first = numbers[1], *const second = numbers[2];
    float *const gradient = numbers[3];
    const size_t count = static_cast<size_t>(facts.numbers);
    double squares = 0.0;
    for (size_t i = 0; i < count; ++i) {
        squares += static_cast<double>(gradient[i]) * gradient[i];
    }
    update.norm = std::sqrt(squares);
    if (!std::isfinite(update.norm)) {
        throw Failure(LANEWAY_NOT_FINITE, "the gradient is not finite");
    }
    const double cut = update.most_norm > 0 && update.norm > update.most_norm ? update.most_norm / update.norm : 1.0;
    const double step = static_cast<double>(update.step);
    const double whole1 = 1.0 - std::pow(update.beta1, step), whole2 = 1.0 - std::pow(update.beta2, step);
    for (size_t i = 0; i < count; ++i) {
        const double g = gradient[i] * cut;
        first[i] = static_cast<float>(update.beta1 * first[i] + (1.0 - update.beta1) * g);
        second[i] = static_cast<float>(update.beta2 * second[i] + (1.0 - update.beta2) * g * g);
        const double moved = first[i] / whole1 / (std::sqrt(second[i] / whole2) + update.epsilon);
        adapter_numbers[i] = static_cast<float>(adapter_numbers[i] * (1.0 - update.rate * update.decay) - update.rate * moved);
        gradient[i] = 0.0f;
    }
}

// ---- the border

extern "C" {

int32_t laneway_trainer_new(const laneway_training *training, laneway_trainer **trainer, laneway_error *error) {
    *trainer = nullptr;
    return guarded(error, [&] { *trainer = new laneway_trainer(*training); });
}

void laneway_trainer_free(laneway_trainer *trainer) { delete trainer; }

void laneway_trainer_describe(const laneway_trainer *trainer, laneway_trainer_facts *facts) { *facts = trainer->facts; }

void laneway_trainer_describe_tensor(const laneway_trainer *trainer, int32_t index, laneway_trainer_tensor *tensor) {
    *tensor = {};
    if (index < 0 || static_cast<size_t>(index) >= trainer->parameters.size()) {
        return;
    }
    const Parameter &found = trainer->parameters[static_cast<size_t>(index)];
    std::snprintf(tensor->name, sizeof tensor->name, "%s", found.name.c_str());
    tensor->columns = found.tensor->ne[0];
    tensor->rows = found.tensor->ne[1];
    tensor->offset = found.offset;
}

int32_t laneway_trainer_load(laneway_trainer *trainer, laneway_error *error) {
    return guarded(error, [&] { trainer->load(); });
}

float *laneway_trainer_numbers(laneway_trainer *trainer, int32_t which) {
    return which < 0 || which > 3 ? nullptr : trainer->numbers[which];
}

int32_t laneway_trainer_run(laneway_trainer *trainer, laneway_pass *pass, laneway_error *error) {
    return guarded(error, [&] { trainer->run(*pass); });
}

int32_t laneway_trainer_update(laneway_trainer *trainer, laneway_update *update, laneway_error *error) {
    return guarded(error, [&] { trainer->update(*update); });
}

} // extern "C"
