// Attention of one layer in one step over paged KV, float32, for processors. See native.py, which compiles it for one
// geometry: -DKV_HEADS, -DKEY_WIDTH, -DVALUE_WIDTH (of one head), -DBLOCK (tokens of a KV block).
//
// A panel holds query rows (a token's head each) side by side in vector lanes, all of one KV head. Scores are kept
// transposed, a column for each row: keys and values are read where they lie, one number at a time against whole
// vectors, nothing is gathered or packed but the queries, and no sum crosses lanes. Tokens go by in pieces, the softmax
// being corrected on the way (FlashAttention, Dao et al. 2022); the tokens of a long history are shared among threads
// and the parts merged (Flash-Decoding, Dao et al. 2023).

#include <cstdint>
#include <cstring>
#include <initializer_list>

#ifdef __AVX512F__
constexpr int LANES = 16, REGISTER_ROWS = 8;
#else
constexpr int LANES = 8, REGISTER_ROWS = 4;
#endif
constexpr int VECTORS = 3;         // of a panel, at most: with REGISTER_ROWS, what the registers hold
constexpr int PIECE = 64;          // tokens whose scores are held at once
constexpr float NOTHING = -1e30f;  // the largest score before any was seen
constexpr float LOG2E = 1.44269504f;

constexpr int dividing(int count) { return count % REGISTER_ROWS == 0 ? REGISTER_ROWS : count % 4 == 0 ? 4 : 1; }
constexpr int TOKENS = dividing(BLOCK);         // scored together: they lie in one block
constexpr int ELEMENTS = dividing(VALUE_WIDTH);  // of a value, added up together
constexpr int AHEAD = 2 * TOKENS;                // tokens fetched before they are needed: a head's rows lie apart

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4)));

struct Span {
    int64_t first, start, hidden, table;  // see step.Span; table: where its blocks begin in Call::blocks
};

struct Item {
    int64_t span, row, rows;  // its rows are (token, head of the group), tokens first
    int64_t begin, end;       // tokens to attend to, by position
    int64_t part, parts, place;  // of the same rows; where the first part lies in Call::partial
};

struct Call {
    const float *query, *key, *value;  // [Hq, T, D], [Hkv, T, D], [Hkv, T, Dv]
    float *keys, *values;              // the KV memory: [slots, Hkv, D], [slots, Hkv, Dv]
    float *out, *partial;              // [T, Hq, Dv]; results of parts
    const float *sinks;                // [Hq], or null
    const int64_t *slots, *blocks;     // of new tokens; of all spans
    const Span *spans;
    const Item *items;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;  // strides in elements
    int64_t rows, items_count, group, threads;
    int64_t window;        // 0: none
    float scale, softcap;  // softcap 0: none
};

static inline Vector load(const float *from) { return *(const Vector *)from; }
static inline void store(float *to, Vector what) { *(Vector *)to = what; }
static inline Vector all(float number) { return Vector{} + number; }
static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// 2^x for x <= 0; 0 below -126; NaN for NaN. Relative error 2e-7: Taylor's terms on [-1/2, 1/2].
static inline Vector power_of_two(Vector x) {
    const Vector rounder = all(12582912.f);  // 1.5 * 2^23: adding it leaves no fraction
    const Vector kept = x < -126.f ? all(-127.f) : x, whole = (kept + rounder) - rounder, rest = kept - whole;
    Vector sum = all(1.5403530e-4f);
    for (float term : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
        sum = sum * rest + term;
    const Integers bits = (Integers)sum + (__builtin_convertvector(whole, Integers) << 23);
    return (Vector)bits;
}

// softcap * tanh(x / softcap), times LOG2E. Near 0 by Taylor's terms: there the other form takes like from like.
static inline Vector bent(Vector x, float softcap) {
    const Vector at = x / softcap, square = at * at, size = at < 0.f ? -at : at;
    const Vector power = power_of_two(size * (-2 * LOG2E));
    const Vector far = (1.f - power) / (1.f + power);
    const Vector near = at * (1.f + square * (-1.f / 3 + square * (2.f / 15 - square * (17.f / 315))));
    return (size < 0.1f ? near : at < 0.f ? -far : far) * (softcap * LOG2E);
}

// Of C vectors of rows: the weighted sum of values, the sum of the weights, and the largest score in powers of two.
template <int C>
struct alignas(64) Result {
    float sum[VALUE_WIDTH][C * LANES], total[C * LANES], most[C * LANES];
};
constexpr int64_t PARTIAL = sizeof(Result<VECTORS>) / sizeof(float);

template <int C>
struct alignas(64) Panel {
    float query[KEY_WIDTH][C * LANES], scores[PIECE][C * LANES], position[C * LANES];
    Result<C> result;

    // Scores of TOKENS tokens, whose keys begin at ``keys``, into rows ``at`` and on.
    inline void score(const float *keys, int at) {
        Vector sums[TOKENS][C] = {};
        for (int d = 0; d < KEY_WIDTH; d++)
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 3
                for (int c = 0; c < C; c++)
                    sums[t][c] += keys[t * KV_HEADS * KEY_WIDTH + d] * load(&query[d][c * LANES]);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 3
            for (int c = 0; c < C; c++) store(&scores[at + t][c * LANES], sums[t][c]);
    }

    // A row sees the tokens after position - window, up to its position. ``first``: the position of scores[0].
    inline void hide(int from, int to, int64_t first, int64_t window) {
        for (int c = 0; c < C * LANES; c += LANES)
            for (int t = from; t < to; t++) {
                const float token = first + t;
                Integers unseen = load(&position[c]) < token;
                if (window) unseen |= load(&position[c]) >= token + window;
                store(&scores[t][c], unseen ? all(-__builtin_inff()) : load(&scores[t][c]));
            }
    }

    // Scores become weights; what was added up before shrinks to the new largest score.
    inline void weigh(int from, int to) {
        Vector most[C], total[C], kept[C];
        for (int c = 0; c < C; c++) most[c] = load(&result.most[c * LANES]);
        for (int t = from; t < to; t++)
#pragma GCC unroll 3
            for (int c = 0; c < C; c++) most[c] = larger(load(&scores[t][c * LANES]), most[c]);
        for (int c = 0; c < C; c++) {
            kept[c] = power_of_two(load(&result.most[c * LANES]) - most[c]);
            total[c] = load(&result.total[c * LANES]) * kept[c];
            store(&result.most[c * LANES], most[c]);
        }
        for (int t = from; t < to; t++)
#pragma GCC unroll 3
            for (int c = 0; c < C; c++) {
                const Vector weight = power_of_two(load(&scores[t][c * LANES]) - most[c]);
                store(&scores[t][c * LANES], weight);
                total[c] += weight;
            }
        for (int c = 0; c < C; c++) store(&result.total[c * LANES], total[c]);
        for (int d = 0; d < VALUE_WIDTH; d++)
#pragma GCC unroll 3
            for (int c = 0; c < C; c++) store(&result.sum[d][c * LANES], load(&result.sum[d][c * LANES]) * kept[c]);
    }

    // Add the values of tokens from..to; ``values``: where those of each TOKENS tokens begin.
    inline void add(const float *const *values, int from, int to) {
        for (int d = 0; d < VALUE_WIDTH; d += ELEMENTS) {
            Vector sums[ELEMENTS][C];
#pragma GCC unroll 8
            for (int e = 0; e < ELEMENTS; e++)
#pragma GCC unroll 3
                for (int c = 0; c < C; c++) sums[e][c] = load(&result.sum[d + e][c * LANES]);
            for (int t = from; t < to;) {
                const float *value = values[t / TOKENS] + t % TOKENS * KV_HEADS * VALUE_WIDTH + d;
                for (const int end = t + TOKENS - t % TOKENS; t < end && t < to; t++, value += KV_HEADS * VALUE_WIDTH)
#pragma GCC unroll 8
                    for (int e = 0; e < ELEMENTS; e++)
#pragma GCC unroll 3
                        for (int c = 0; c < C; c++) sums[e][c] += value[e] * load(&scores[t][c * LANES]);
            }
#pragma GCC unroll 8
            for (int e = 0; e < ELEMENTS; e++)
#pragma GCC unroll 3
                for (int c = 0; c < C; c++) store(&result.sum[d + e][c * LANES], sums[e][c]);
        }
    }
};

template <int C>
static void write(const Call &call, const Item &item, int64_t head, const Result<C> &result) {
    for (int column = 0; column < item.rows; column++) {
        const int64_t row = item.row + column, token = call.spans[item.span].first + row / call.group;
        float *out = call.out + ((token * KV_HEADS + head) * call.group + row % call.group) * VALUE_WIDTH;
        const float share = 1 / result.total[column];
        for (int d = 0; d < VALUE_WIDTH; d++) out[d] = result.sum[d][column] * share;
    }
}

template <int C>
static Result<C> *partial(const Call &call, const Item &item, int64_t head, int64_t part) {
    return (Result<C> *)(call.partial + ((item.place + part) * KV_HEADS + head) * PARTIAL);
}

// Where a token's key, and its value, lie in the KV memory, in rows of one head; ``token``: counted from span.hidden.
static inline int64_t row_of(const Call &call, const Span &span, int64_t token, int64_t head) {
    return (call.blocks[span.table + token / BLOCK] * BLOCK + token % BLOCK) * KV_HEADS + head;
}

static inline void fetch(const float *rows, int width) {
    for (int t = 0; t < TOKENS; t++, rows += KV_HEADS * width)
        for (int d = 0; d < width; d += 16) __builtin_prefetch(rows + d);
}

template <int C>
static void attend(const Call &call, const Item &item, int64_t head) {
    const Span &span = call.spans[item.span];
    Panel<C> panel;
    Result<C> &result = panel.result;
    memset(result.sum, 0, sizeof result.sum);
    const float scale = call.softcap ? call.scale : call.scale * LOG2E;
    for (int column = 0; column < C * LANES; column++) {
        const int64_t row = item.row + (column < item.rows ? column : 0), token = row / call.group;
        const int64_t query_head = head * call.group + row % call.group;
        const float *query = call.query + query_head * call.query_head + (span.first + token) * call.query_row;
        for (int d = 0; d < KEY_WIDTH; d++) panel.query[d][column] = query[d] * scale;
        panel.position[column] = span.start + token;
        const float sink = call.sinks && item.part == 0 ? call.sinks[query_head] * LOG2E : NOTHING;
        result.most[column] = sink > NOTHING ? sink : NOTHING;
        result.total[column] = sink > NOTHING;
    }
    const int64_t oldest = span.start + item.row / call.group;
    const int64_t newest = span.start + (item.row + item.rows - 1) / call.group;
    const int64_t end = item.end < newest + 1 ? item.end : newest + 1;
    int64_t begin = item.begin;
    if (call.window && oldest - call.window + 1 > begin) begin = oldest - call.window + 1;
    for (int64_t piece = begin / TOKENS * TOKENS; piece < end; piece += PIECE) {
        const int from = piece < begin ? begin - piece : 0, to = end - piece < PIECE ? end - piece : PIECE;
        const float *values[PIECE / TOKENS];
        for (int at = 0; at < to; at += TOKENS) {
            const int64_t token = piece + at - span.hidden, row = row_of(call, span, token, head);
            if (piece + at + AHEAD < end) {
                const int64_t next = row_of(call, span, token + AHEAD, head);
                fetch(call.keys + next * KEY_WIDTH, KEY_WIDTH);
                fetch(call.values + next * VALUE_WIDTH, VALUE_WIDTH);
            }
            values[at / TOKENS] = call.values + row * VALUE_WIDTH;
            panel.score(call.keys + row * KEY_WIDTH, at);
        }
        if (call.softcap)
            for (float *s = panel.scores[from]; s < panel.scores[0] + to * C * LANES; s += LANES)
                store(s, bent(load(s), call.softcap));
        if (piece + to - 1 > oldest || (call.window && piece + from <= newest - call.window))
            panel.hide(from, to, piece, call.window);
        panel.weigh(from, to);
        panel.add(values, from, to);
    }
    if (item.parts == 1)
        write<C>(call, item, head, result);
    else
        memcpy(partial<C>(call, item, head, item.part), &result, sizeof result);
}

template <int C>
static void merge(const Call &call, const Item &item, int64_t head) {
    Result<C> &whole = *partial<C>(call, item, head, 0);
    for (int64_t part = 1; part < item.parts; part++) {
        const Result<C> &other = *partial<C>(call, item, head, part);
        for (int c = 0; c < C * LANES; c += LANES) {
            const Vector most = larger(load(&whole.most[c]), load(&other.most[c]));
            const Vector mine = power_of_two(load(&whole.most[c]) - most), its = power_of_two(load(&other.most[c]) - most);
            store(&whole.total[c], load(&whole.total[c]) * mine + load(&other.total[c]) * its);
            store(&whole.most[c], most);
            for (int d = 0; d < VALUE_WIDTH; d++)
                store(&whole.sum[d][c], load(&whole.sum[d][c]) * mine + load(&other.sum[d][c]) * its);
        }
    }
    write<C>(call, item, head, whole);
}

template <int C>
static void run(const Call &call, const Item &item, int64_t head, bool merging) {
    merging ? merge<C>(call, item, head) : attend<C>(call, item, head);
}

static void run_all(const Call &call, bool merging) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t number = 0; number < call.items_count * KV_HEADS; number++) {
        const Item &item = call.items[number / KV_HEADS];
        const int64_t head = number % KV_HEADS;
        if (merging && (item.parts == 1 || item.part != 0)) continue;
        switch ((item.rows + LANES - 1) / LANES) {
            case 1: run<1>(call, item, head, merging); break;
            case 2: run<2>(call, item, head, merging); break;
            default: run<VECTORS>(call, item, head, merging);
        }
    }
}

static void keep(const Call &call) {
#pragma omp parallel for num_threads(call.threads) if (call.rows > PIECE)
    for (int64_t row = 0; row < call.rows; row++)
        for (int64_t head = 0; head < KV_HEADS; head++) {
            const int64_t at = call.slots[row] * KV_HEADS + head;
            const float *key = call.key + head * call.key_head + row * call.key_row;
            const float *value = call.value + head * call.value_head + row * call.value_row;
            memcpy(call.keys + at * KEY_WIDTH, key, KEY_WIDTH * sizeof(float));
            memcpy(call.values + at * VALUE_WIDTH, value, VALUE_WIDTH * sizeof(float));
        }
}

extern "C" {
extern const int64_t PANEL_ROWS = VECTORS * LANES;       // most rows of an item
extern const int64_t PARTIAL_FLOATS = KV_HEADS * PARTIAL;  // of one part of an item

// Keep the new keys and values, then attend.
void attend_layer(const Call *call) {
    keep(*call);
    run_all(*call, false);
    if (call->partial) run_all(*call, true);
}
}
