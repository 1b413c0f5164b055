// Products of float32 rows with a weight that is kept in 4, 8 or 16 bits, for processors. See native.py, which compiles
// it with -DTILE.
//
// The weight lies in tiles of TILE outputs, for each input those of all of them side by side, so that an input is
// multiplied with whole vectors and no sum crosses lanes. Few rows: weights are unfolded in registers, on their way from
// memory. Many rows: a tile is unfolded once for all of them (Goto and van de Geijn 2008, with rows and weights swapped).
// Every output is summed up in the order of its inputs, however many rows there are.

#include <cstdint>
#include <cstdlib>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int LANES = 16, MANY = 12;  // MANY: rows whose sums the registers hold, two vectors each
#else
constexpr int LANES = 8, MANY = 6;
#endif
constexpr int VECTORS = TILE / LANES;  // of a tile's outputs
constexpr int PAIR = 2;              // vectors that are summed up together, but for 9 to 16 rows
constexpr int64_t DEPTH = 768;       // inputs of a tile that are unfolded at once, at most: 96 KiB
constexpr int64_t NEAR = 512 << 10;  // bytes of rows that are multiplied with them

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4)));

struct Call {
    const float *rows;    // [count, inputs], a row every ``stride`` numbers
    const uint8_t *tiles; // of the weight: codes, then for each group of inputs TILE scales and TILE offsets
    const float *bias;    // [outputs], or null
    float *out;           // [count, outputs]
    int64_t count, stride, inputs, outputs;
    int64_t bits, group;  // of a code; inputs that share a scale
    int64_t threads;
};

static inline Vector load(const float *from) { return *(const Vector *)from; }
static inline void store(float *to, Vector what) { *(Vector *)to = what; }

// GCC 12 takes ``__builtin_convertvector`` from bytes to pieces.
#if defined(__AVX512F__)
static inline Integers widened(const uint8_t *from) {
    return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
static inline Integers widened(const uint16_t *from) {
    return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
#elif defined(__AVX2__)
static inline Integers widened(const uint8_t *from) {
    return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
static inline Integers widened(const uint16_t *from) {
    return (Integers)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}
#else
template <typename Code>
static inline Integers widened(const Code *from) {
    Integers wide;
    for (int lane = 0; lane < LANES; lane++) wide[lane] = from[lane];
    return wide;
}
#endif
static inline Vector number(Integers whole) { return __builtin_convertvector(whole, Vector); }

// Reads WIDE vectors of one tile, from vector ``first`` on. Bits 4: a byte holds the codes of two inputs.
template <int BITS, int WIDE>
struct Folded {
    static constexpr int INPUTS = BITS == 4 ? 2 : 1;
    static constexpr bool GRID = BITS != 16;
    const uint8_t *codes;
    const float *grid;
    Vector scale[WIDE], offset[WIDE];

    inline Folded(const Call &call, int64_t tile, int first) {
        const int64_t groups = GRID ? call.inputs / call.group : 0, codes_size = call.inputs * TILE * BITS / 8;
        const uint8_t *begin = call.tiles + tile * (codes_size + groups * 2 * TILE * (int64_t)sizeof(float));
        codes = begin + first * LANES * (BITS == 16 ? 2 : 1);
        grid = (const float *)(begin + codes_size) + first * LANES;
    }
    inline void enter(int64_t group) {
        if (!GRID) return;
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            scale[v] = load(grid + group * 2 * TILE + v * LANES);
            offset[v] = load(grid + group * 2 * TILE + TILE + v * LANES);
        }
    }
    inline void read(int64_t input, Vector weights[INPUTS][WIDE]) const {
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            if (BITS == 16) {
                weights[0][v] = (Vector)(widened((const uint16_t *)codes + input * TILE + v * LANES) << 16);
                continue;
            }
            const Integers code = widened(codes + input / INPUTS * TILE + v * LANES);
            weights[0][v] = number(BITS == 4 ? code & 15 : code) * scale[v] + offset[v];
            if (BITS == 4) weights[INPUTS - 1][v] = number(code >> 4) * scale[v] + offset[v];
        }
    }
};

// Weights that were unfolded: [inputs, TILE] from ``begin`` on.
template <int WIDE>
struct Unfolded {
    static constexpr int INPUTS = 1;
    static constexpr bool GRID = false;
    const float *weights_at;
    int64_t begin;

    inline void enter(int64_t) {}
    inline void read(int64_t input, Vector weights[INPUTS][WIDE]) const {
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) weights[0][v] = load(weights_at + (input - begin) * TILE + v * LANES);
    }
};

// Add inputs from..to of ROWS rows ([inputs, ROWS]) to what ``out`` has of the outputs from ``column`` on.
template <int ROWS, int WIDE, typename Weights>
static inline void add(const Call &call, Weights weights, const float *rows, int64_t from, int64_t to, int64_t first_row,
                       int64_t column) {
    constexpr int INPUTS = Weights::INPUTS;
    const int64_t there = call.count - first_row;  // rows beyond are made up
    float *out = call.out + first_row * call.outputs + column;
    Vector sums[ROWS][WIDE] = {};
    if (from)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            if (r < there)
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) sums[r][v] = load(out + r * call.outputs + v * LANES);
    const int64_t size = Weights::GRID ? call.group : to - from;
    for (int64_t begin = from; begin < to; begin += size) {
        weights.enter(begin / call.group);
        for (int64_t input = begin; input < begin + size; input += INPUTS) {
            Vector read[INPUTS][WIDE];
            weights.read(input, read);
#pragma GCC unroll 2
            for (int n = 0; n < INPUTS; n++)
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < WIDE; v++) sums[r][v] += rows[(input + n) * ROWS + r] * read[n][v];
        }
    }
    const float *bias = to == call.inputs && call.bias ? call.bias + column : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        if (r < there)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++)
                store(out + r * call.outputs + v * LANES, bias ? sums[r][v] + load(bias + v * LANES) : sums[r][v]);
}

template <int BITS>
static inline void unfold(const Call &call, int64_t tile, int64_t from, int64_t to, float *into) {
    using Weights = Folded<BITS, PAIR>;
    for (int first = 0; first < VECTORS; first += PAIR) {
        Weights weights(call, tile, first);
        for (int64_t begin = from; begin < to; begin += call.group) {
            weights.enter(begin / call.group);
            for (int64_t input = begin; input < begin + call.group; input += Weights::INPUTS) {
                Vector read[Weights::INPUTS][PAIR];
                weights.read(input, read);
                for (int n = 0; n < Weights::INPUTS; n++)
                    for (int v = 0; v < PAIR; v++)
                        store(into + (input + n - from) * TILE + (first + v) * LANES, read[n][v]);
            }
        }
    }
}

// Kept by each thread, as large as it was ever needed.
struct Scratch {
    float *at = nullptr;
    int64_t size = 0;
    float *of(int64_t floats) {
        if (floats > size) {
            free(at);
            at = (float *)aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
            size = floats;
        }
        return at;
    }
    ~Scratch() { free(at); }
};
static thread_local Scratch turned_rows, unfolded_tile;

// Of ROWS rows the numbers of one input side by side; the last row stands in for those beyond it.
template <int ROWS>
static inline void turn(const Call &call, int64_t block, float *to) {
    const float *from[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const int64_t row = block * ROWS + r;
        from[r] = call.rows + (row < call.count ? row : call.count - 1) * call.stride;
    }
    for (int64_t input = 0; input < call.inputs; input++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) to[input * ROWS + r] = from[r][input];
}

template <int BITS, int ROWS, int WIDE>
static void few(const Call &call) {
    const float *rows = call.rows;
    if (ROWS > 1) {
        float *turned = turned_rows.of(ROWS * call.inputs);
        turn<ROWS>(call, 0, turned);
        rows = turned;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t tile = 0; tile < call.outputs / TILE; tile++)
        for (int first = 0; first < VECTORS; first += WIDE)
            add<ROWS, WIDE>(call, Folded<BITS, WIDE>(call, tile, first), rows, 0, call.inputs, 0,
                            tile * TILE + first * LANES);
}

template <int BITS>
static void many(const Call &call) {
    const int64_t blocks = (call.count + MANY - 1) / MANY, tiles = call.outputs / TILE;
    const int64_t cuts = (call.inputs + DEPTH - 1) / DEPTH, groups = (call.inputs + call.group - 1) / call.group;
    const int64_t depth = (groups + cuts - 1) / cuts * call.group;
    const int64_t fit = NEAR / (MANY * depth * (int64_t)sizeof(float));
    const int64_t parts = (blocks + fit - 1) / fit, part_blocks = (blocks + parts - 1) / parts;
    float *turned = turned_rows.of(blocks * MANY * call.inputs);
#pragma omp parallel num_threads(call.threads)
    {
        float *tile_at = unfolded_tile.of(depth * TILE);
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < blocks; block++) turn<MANY>(call, block, turned + block * MANY * call.inputs);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < parts * tiles; item++) {
            const int64_t tile = item % tiles, first_block = item / tiles * part_blocks;
            const int64_t end_block = first_block + part_blocks < blocks ? first_block + part_blocks : blocks;
            for (int64_t from = 0; from < call.inputs; from += depth) {
                const int64_t to = from + depth < call.inputs ? from + depth : call.inputs;
                unfold<BITS>(call, tile, from, to, tile_at);
                for (int64_t block = first_block; block < end_block; block++)
                    for (int first = 0; first < VECTORS; first += PAIR)
                        add<MANY, PAIR>(call, Unfolded<PAIR>{tile_at + first * LANES, from},
                                        turned + block * MANY * call.inputs, from, to, block * MANY,
                                        tile * TILE + first * LANES);
            }
        }
    }
}

template <int BITS>
static void multiply(const Call &call) {
    const int64_t count = call.count;
    if (count == 0) return;
    if (count == 1) return few<BITS, 1, PAIR>(call);
    if (count == 2) return few<BITS, 2, PAIR>(call);
    if (count <= 4) return few<BITS, 4, PAIR>(call);
#ifdef __AVX512F__
    if (count <= 8) return few<BITS, 8, PAIR>(call);
    if (count <= 12) return few<BITS, 12, 1>(call);
    if (count <= 16) return few<BITS, 16, 1>(call);
#endif
    many<BITS>(call);
}

extern "C" void multiply_rows(const Call *call) {
    switch (call->bits) {
        case 4: return multiply<4>(*call);
        case 8: return multiply<8>(*call);
        default: return multiply<16>(*call);
    }
}
