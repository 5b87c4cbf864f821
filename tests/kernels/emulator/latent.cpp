// Runs the blocks of latent_decode one after the other, then those of latent_merge, if it is launched.
#include "latent.cu"

static const Arguments* given;

static void decode_body() { latent_decode(*given), check_waited(), end_fiber(); }
static void merge_body() { latent_merge(*given), end_fiber(); }
static void run_grid(u32 x, u32 y, u32 threads, u32 shared_bytes, void (*body)()) {
    gridDim = {x, y, 1};
    for (u32 i = 0; i < x * y; i++) {
        blockIdx = {i % x, i / x, 0};
        groups.clear();
        run_block(threads, shared_bytes, body);
    }
}

extern "C" void launch(const Arguments* arguments, u32 row_blocks, u32 partitions, u32 rows, u32 requests) {
    given = arguments;
    run_grid(row_blocks, partitions, latent_decode_block[0], latent_decode_block[1], decode_body);
    const u32 shares = arguments->merge_shares;
    auto of_merge = [&](int i) { return latent_merge_block[i] / MOST_SHARES * shares; };
    if (!LEAVES_PARTS) run_grid(rows, requests, of_merge(0), of_merge(1), merge_body);
}
