// Runs the kernel's blocks one after the other; built with the constants of one variant.
#include "decode.cu"

static const Arguments* given;

static void body() {
    decode(*given);
    fibers[running].done = true;
    swapcontext(&fibers[running].context, &scheduler);
}

extern "C" void launch(const Arguments* arguments, u32 x, u32 y, u32 z) {
    given = arguments;
    gridDim = {x, y, z};
    for (u32 i = 0; i < x * y * z; i++) {
        blockIdx = {i % x, i / x % y, i / x / y};
        run_block((WARPS + UNPACKERS) * 32, SHARED_BYTES, body);
    }
}
