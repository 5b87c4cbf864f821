// Bulk copies into shared memory, and the types that keep a copy behind loads of the memory that it overwrites.
//
// A bulk copy is not ordered behind loads that its warp has issued before it: it overtakes loads that are under way,
// and these then return bytes of the copy. (H100, 32 rows of latents: 134 of 1,920 rounds of eight launches gave wrong
// attention.) Neither the order of instructions nor a barrier of the warp or the block holds the copy back; only an
// instruction that waits for the loaded values does. So each copy takes a `LoadsDone`, and the only way to get one is
// to wait for all loads of the warp. Where several warps load from the memory, each waits for its own, and a barrier of
// all of them follows.
//
// tests/kernels/test_copies.py checks this in the machine code of each variant.
#pragma once
#include "ptx.cuh"

class LoadsDone {
    INLINE LoadsDone() {}
    friend INLINE LoadsDone nothing_loaded();
    friend class LastLoad;
};
// The target is memory that no thread has loaded from since the block began.
INLINE LoadsDone nothing_loaded() { return {}; }
// All lanes of the warp issue one more load from shared memory, and wait for it. Loads end in order, so once this one
// has ended, all earlier ones have. It cannot be moved in front of them: ptxas moves no access to memory across
// `sync_warp`.
class LastLoad {
    u32 word;

  public:
    // `address`: any word of shared memory.
    INLINE explicit LastLoad(u32 address) {
        sync_warp();
        word = load_shared_again(address);
    }
    // The vote's result does not matter, but the compiler cannot know that.
    INLINE LoadsDone wait() const {
        if (__builtin_expect(any_lane(word == ~0u), 0)) fence_async();
        return {};
    }
};

// Waits for the copies of a barrier's phase; afterwards their target may be loaded from.
INLINE void wait_for_copies_of(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }
// Copies to memory that was loaded from before `done`; called by one lane of a warp.
template <int BYTES> INLINE void copy_bulk(LoadsDone done, u32 target, u32 barrier, const u8* source) {
    issue_bulk_copy<BYTES>(target, barrier, source);
}
