// What Python calls, as C declarations that cffi reads and laneway.h includes: no preprocessor in here.
//
// Opaque handles, flat arrays, a status and a text for what went wrong.  Every function that can fail takes a
// laneway_error, returns its code and never throws.  A decoder belongs to one thread at a time; only
// laneway_decoder_interrupt may come from another.  A model may be read from many threads.

enum laneway_status {
    LANEWAY_OK = 0,
    // What llama_decode answers; the rest of its negative codes pass through as LANEWAY_DECODE_FAILED.
    LANEWAY_CELLS_FULL = 1,
    LANEWAY_INTERRUPTED = 2,
    LANEWAY_BAD_BATCH = -1,
    LANEWAY_DECODE_FAILED = -2,
    // Ours.
    LANEWAY_BAD_ARGUMENT = 100,
    LANEWAY_EXCEPTION = 101,
    LANEWAY_OUT_OF_MEMORY = 102,
    LANEWAY_LOAD_FAILED = 103,
    LANEWAY_LOAD_CANCELLED = 104,
    LANEWAY_CONTEXT_FAILED = 105,
    LANEWAY_ADAPTER_FAILED = 106,
    LANEWAY_BAD_GRAMMAR = 107,
    LANEWAY_BAD_LOGITS = 108,
    LANEWAY_NO_TOKEN = 109,
    LANEWAY_UNSUPPORTED = 110,
    LANEWAY_BAD_STATE = 111,
    LANEWAY_NOT_FINITE = 112
};

enum { LANEWAY_TOP_LOGPROBS = 20 };

typedef struct laneway_error {
    int32_t code;
    int32_t slot; // -1: no slot in particular
    char text[512];
} laneway_error;

typedef struct laneway_model laneway_model;
typedef struct laneway_decoder laneway_decoder;
typedef struct laneway_sampler laneway_sampler;

// ---- process

// Starts llama.cpp once.  folder: where backends that are loaded at run time lie.
void laneway_start(const char *folder);
const char *laneway_llama_version(void);
const char *laneway_llama_commit(void);
const char *laneway_system_info(void);
int32_t laneway_has_gpu(void);

// llama.cpp's log lines wait in a ring until they are taken; lines below level are dropped at once.
// Levels are ggml's: 1 debug, 2 info, 3 warning, 4 error; 6 is a warning of our own.
void laneway_log_level(int32_t level);
int32_t laneway_log_waiting(void);
// Takes the oldest line; returns its level, 0 if there is none.
int32_t laneway_log_take(char *text, int32_t size);

// ---- attention

// Which attention the CPU takes, in the whole process.  wanted: 1 ours, 0 llama.cpp's, anything else asks.  Returns what
// holds from now on, -1 if this build has none of ours.  Waits for steps under way.
int32_t laneway_attention(int32_t wanted);
// How many operations ours has computed.
int64_t laneway_attention_count(void);

// One operation on its own, laid out as in a decoder's graph.  Strides follow from the numbers.
typedef struct laneway_attention_case {
    int32_t size; // of a head
    int32_t heads;
    int32_t heads_kv;
    int32_t rows;     // of queries, of each stream
    int32_t cells;    // that the operation sees
    int32_t capacity; // cells of a stream in k and v, at least as many
    int32_t streams;
    int32_t threads;
    int32_t type;    // ggml's number, of k and v
    int32_t repeats; // to measure
    float scale;
    float max_bias;
    float cap;
    const float *q;       // streams, rows, heads, size
    const void *k;        // streams, capacity, heads_kv, size
    const void *v;        // the same
    const uint16_t *mask; // streams, rows, cells: halves; NULL: none
    const float *sinks;   // heads; NULL: none
} laneway_attention_case;

// out: streams, rows, heads, size.  seconds: one for each repeat.
int32_t laneway_attention_run(const laneway_attention_case *given, float *out, double *seconds, laneway_error *error);

// ---- model

// cancelled: set it to non-zero, from any thread, and the load ends soon.  progress: 0 to 1.
// load_mode: 0 read, 1 map, -1 llama.cpp's choice.
int32_t laneway_model_load(const char *path, int32_t gpu_layers, int32_t load_mode, const int32_t *cancelled,
                           float *progress, laneway_model **model, laneway_error *error);
void laneway_model_free(laneway_model *model);

typedef struct laneway_model_facts {
    uint64_t tensor_bytes;
    uint64_t parameters;
    int32_t vocabulary;
    int32_t context_train;
    int32_t embedding;
    int32_t layers;
    int32_t heads;
    int32_t heads_kv;
    int32_t window; // of sliding attention; 0: none
    int32_t recurrent;
    int32_t hybrid;
    int32_t encoder;
    int32_t decoder;
    int32_t diffusion;
    int32_t vocabulary_type; // 0: none
    int32_t bos;             // -1: none
    int32_t eos;
    int32_t adds_bos;
} laneway_model_facts;

void laneway_model_describe(const laneway_model *model, laneway_model_facts *facts);
// Texts belong to the model; NULL: none.
const char *laneway_model_template(const laneway_model *model);
const char *laneway_model_token_text(const laneway_model *model, int32_t token);
// Writes at most size bytes and returns the bytes that there are, -1 for none.
int32_t laneway_model_metadata_count(const laneway_model *model);
int32_t laneway_model_metadata_key(const laneway_model *model, int32_t index, char *text, size_t size);
int32_t laneway_model_metadata_value(const laneway_model *model, int32_t index, char *text, size_t size);
// Which tokens end an answer: writes at most size ids, returns how many there are.
int32_t laneway_model_end_tokens(const laneway_model *model, int32_t *tokens, int32_t size);
int32_t laneway_model_user_defined(const laneway_model *model, int32_t *tokens, int32_t size);

// Where the text of a special token is that token.  Begins and ends are of spans of bytes, in order, apart from each other;
// markers are user-defined tokens that are treated like control tokens.
typedef struct laneway_rules {
    int32_t everywhere; // the rest does not matter then
    int32_t spans;
    const int32_t *begins;
    const int32_t *ends;
    int32_t markers_count;
    const int32_t *markers;
} laneway_rules;

// tokens: the caller's, to be given to laneway_tokens_free.  stop: one byte that another thread may set to anything but 0,
// or NULL; the status is then LANEWAY_INTERRUPTED soon.  calls: how often llama.cpp was asked.
int32_t laneway_tokenize(const laneway_model *model, const char *text, int32_t length, const laneway_rules *rules,
                         const uint8_t *stop, int32_t **tokens, int32_t *count, int32_t *calls, laneway_error *error);
void laneway_tokens_free(int32_t *tokens);
// How few tokens a text can have at the least; 0 if this vocabulary tells nothing.
int32_t laneway_least_tokens(const laneway_model *model, const char *text, size_t length, int64_t *least,
                             laneway_error *error);
// How many special tokens a text holds, counted up to most.
int32_t laneway_count_specials(const laneway_model *model, const char *text, size_t length, int32_t most, int32_t *count,
                               laneway_error *error);
// llama.cpp's own answer for the whole text, to compare with.
// count: how many there are, which may be more than size; then only the first size were written, or none.
int32_t laneway_llama_tokenize(const laneway_model *model, const char *text, int32_t length, int32_t special,
                               int32_t *tokens, int32_t size, int32_t *count, laneway_error *error);
int32_t laneway_piece(const laneway_model *model, int32_t token, int32_t special,
                      char *text, int32_t size, int32_t *count, laneway_error *error);

// ---- sampling

typedef struct laneway_sampling {
    double temperature;
    double top_p;
    double min_p;
    double repeat_penalty;
    double frequency_penalty;
    double presence_penalty;
    uint64_t seed;
    int32_t top_k;
    int32_t logprobs;     // 0: none wanted
    int32_t top_logprobs; // at most LANEWAY_TOP_LOGPROBS
    int32_t bias_count;
    const int32_t *bias_tokens;
    const float *bias_values;
    const char *grammar; // NULL: none
} laneway_sampling;

typedef struct laneway_choice {
    int32_t token; // -1: none was asked for
    int32_t top_count;
    float logprob;
    int32_t top_tokens[LANEWAY_TOP_LOGPROBS];
    float top_logprobs[LANEWAY_TOP_LOGPROBS];
} laneway_choice;

// A sampler on its own.  model: NULL if there is no grammar.
int32_t laneway_sampler_new(const laneway_model *model, const laneway_sampling *sampling, const int32_t *prompt,
                            int32_t prompt_count, laneway_sampler **sampler, laneway_error *error);
void laneway_sampler_free(laneway_sampler *sampler);
// Changes logits in place.
int32_t laneway_sampler_pick(laneway_sampler *sampler, float *logits, int32_t count, laneway_choice *choice,
                             laneway_error *error);

// ---- decoder

typedef struct laneway_adapter {
    const char *path;
    float scale;
} laneway_adapter;

typedef struct laneway_options {
    uint32_t context;  // cells, all slots together
    uint32_t batch;    // tokens of one step, at most
    int32_t slots;
    int32_t threads;
    int32_t poll;      // 0: threads sleep when there is no work, 100: they spin
    int32_t type_k;    // ggml's numbers
    int32_t type_v;
    int32_t unified;
    int32_t flash_attention;
    int32_t whole_window; // sliding-window layers keep all cells
    float rope_base;      // 0: the model's own
    float rope_scale;
    int32_t adapters_count;
    const laneway_adapter *adapters;
} laneway_options;

int32_t laneway_decoder_new(laneway_model *model, const laneway_options *options, laneway_decoder **decoder,
                            laneway_error *error);
void laneway_decoder_free(laneway_decoder *decoder);

typedef struct laneway_decoder_facts {
    uint32_t context;
    uint32_t slot_cells;
    uint32_t batch;
} laneway_decoder_facts;

void laneway_decoder_describe(const laneway_decoder *decoder, laneway_decoder_facts *facts);

int32_t laneway_decoder_open(laneway_decoder *decoder, int32_t slot, const laneway_sampling *sampling,
                             const int32_t *prompt, int32_t prompt_count, laneway_error *error);
int32_t laneway_decoder_drop(laneway_decoder *decoder, int32_t slot, laneway_error *error);
int32_t laneway_decoder_copy(laneway_decoder *decoder, int32_t source, int32_t target, int32_t length,
                             laneway_error *error);
// Forgets a slot's sampler, and its cells but the first length.
int32_t laneway_decoder_cut(laneway_decoder *decoder, int32_t slot, int32_t length, laneway_error *error);
// Whether copy works here, and cut for any length, as long as no cells have slid away.
int32_t laneway_decoder_shares_prefixes(const laneway_decoder *decoder);
// Cells of a slot: the position after the last one, 0 if it is empty.
int32_t laneway_decoder_length(const laneway_decoder *decoder, int32_t slot);
int32_t laneway_decoder_is_open(const laneway_decoder *decoder, int32_t slot);

// One step: the moves, then one batch, then one sample for each chunk that asks.  choices has chunks entries.
// tokens holds the chunks' tokens one after the other.  In each round after the first the tokens that were picked before
// are decoded, but for end tokens, and the next ones picked; all chunks must be of one token then, and ask for one.
enum { LANEWAY_MOST_ROUNDS = 32 };

typedef struct laneway_chunk {
    int32_t slot;
    int32_t position; // of its first token
    int32_t count;
    int32_t sample;
} laneway_chunk;

typedef struct laneway_batch {
    int32_t count; // of chunks
    int32_t moves;
    const laneway_chunk *chunks;
    const int32_t *tokens;
    const int32_t *moves_from;
    const int32_t *moves_to;
    int32_t rounds;          // wanted; afterwards: done
    int32_t *picked;         // rounds times chunks entries: the token, -1 where none was asked for
    laneway_choice *choices; // chunks entries, filled only where log-probabilities were asked for
    double seconds;
} laneway_batch;

// Hands a step to the decoder's own thread and returns.  batch and error are that thread's until the step was ended.
int32_t laneway_decoder_begin_step(laneway_decoder *decoder, laneway_batch *batch, laneway_error *error);
// A file descriptor that can be read from once the step is over, until it was ended.
int32_t laneway_decoder_step_ended(const laneway_decoder *decoder);
// The status of the step.  Waits for its end, if it has not come.
int32_t laneway_decoder_end_step(laneway_decoder *decoder);
void laneway_decoder_interrupt(laneway_decoder *decoder);
// Lets the step under way end after the round that it is in.  From any thread, too.
void laneway_decoder_end_round(laneway_decoder *decoder);
// Forgets what of both came when no step was under way.
void laneway_decoder_arm(laneway_decoder *decoder);

// A slot's cells as bytes, which belong to the decoder and hold until its next call.  size: 0 for an empty slot.
int32_t laneway_decoder_state_get(laneway_decoder *decoder, int32_t slot, const uint8_t **bytes, size_t *size,
                                  laneway_error *error);
// Keeps the first length tokens of it; after an error the slot is empty.
int32_t laneway_decoder_state_set(laneway_decoder *decoder, int32_t slot, const uint8_t *bytes, size_t size,
                                  int32_t length, laneway_error *error);

// ---- training

// An adapter that is trained on a model of its own: the file is read, no laneway_model is needed.  One thread at a time.
typedef struct laneway_trainer laneway_trainer;

typedef struct laneway_training {
    const char *path;
    int32_t threads;
    int32_t rank;
    float alpha;
    uint32_t modules;    // a bit each, from the lowest: attn_q, attn_k, attn_v, attn_output, ffn_gate, ffn_up, ffn_down
    uint64_t seed;
    int32_t copies;      // 1: matrices as F32, 0: as they lie in the file, which is mapped
    int32_t recompute;   // 1: the backward pass computes each layer anew, so that little is kept of the forward pass
    int32_t most_tokens; // of one pass
} laneway_training;

// Reads the header and works out what memory is needed; LANEWAY_UNSUPPORTED if such a model cannot be trained.
int32_t laneway_trainer_new(const laneway_training *training, laneway_trainer **trainer, laneway_error *error);
void laneway_trainer_free(laneway_trainer *trainer);

typedef struct laneway_trainer_facts {
    uint64_t copied;      // bytes of weights that are set aside
    uint64_t mapped;      // bytes of the file that every pass reads
    uint64_t activations; // bytes of the largest pass
    uint64_t state;       // bytes of the adapter, its gradient and its two moments
    int64_t numbers;      // of each of these, padding included
    int64_t parameters;
    int32_t tensors;
    int32_t layers;
    int32_t vocabulary;
    int32_t context_train;
} laneway_trainer_facts;

void laneway_trainer_describe(const laneway_trainer *trainer, laneway_trainer_facts *facts);

typedef struct laneway_trainer_tensor {
    char name[80];
    int64_t columns;
    int64_t rows;
    int64_t offset; // of its first number
} laneway_trainer_tensor;

void laneway_trainer_describe_tensor(const laneway_trainer *trainer, int32_t index, laneway_trainer_tensor *tensor);

// Sets everything aside and reads the weights; the adapter changes nothing yet.
int32_t laneway_trainer_load(laneway_trainer *trainer, laneway_error *error);
// which: 0 the adapter, 1 and 2 its moments, 3 the gradient since the last update.  NULL before it was loaded.
float *laneway_trainer_numbers(laneway_trainer *trainer, int32_t which);

typedef struct laneway_pass {
    int32_t sequences;
    const int32_t *lengths;
    const int32_t *tokens;  // of all sequences, one after the other
    const uint8_t *counted; // for each token: whether the prediction of it counts
    double weight;          // of each prediction in the gradient
    int32_t learn;          // 0: the loss only
    double loss;            // out: the sum over the predictions that count
    int64_t predictions;    // out: how many do
} laneway_pass;

int32_t laneway_trainer_run(laneway_trainer *trainer, laneway_pass *pass, laneway_error *error);

typedef struct laneway_update {
    int64_t step; // from 1 on
    double rate;
    double decay;
    double beta1;
    double beta2;
    double epsilon;
    double most_norm; // a longer gradient is cut to it; 0: never
    double norm;      // out: of the gradient
} laneway_update;

// One step of AdamW, after which the gradient is zero.  LANEWAY_NOT_FINITE, and nothing is changed, if the gradient is not.
int32_t laneway_trainer_update(laneway_trainer *trainer, laneway_update *update, laneway_error *error);
