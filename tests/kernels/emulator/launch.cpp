// Runs the kernel's blocks one after the other; built with the constants of one variant.
#ifndef KERNEL
#define KERNEL decode
#define LAUNCHED_BLOCK decode_block
#include "decode.cu"
#endif

static const Arguments* given;

static void body() {
    KERNEL(*given);
#ifdef BEGINS_EARLY
    check_waited();
#endif
    end_fiber();
}

extern "C" void launch(const Arguments* arguments, u32 x, u32 y, u32 z) {
    given = arguments;
    gridDim = {x, y, z};
    for (u32 i = 0; i < x * y * z; i++) {
        blockIdx = {i % x, i / x % y, i / x / y};
        run_block(LAUNCHED_BLOCK[0], LAUNCHED_BLOCK[1], body);
    }
}
