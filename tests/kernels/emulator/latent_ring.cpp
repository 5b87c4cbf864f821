#define KERNEL attend_latent_ring
#define BLOCK attend_latent_ring_block
#define BEGINS_EARLY
#include "latent_ring.cu"
#include "launch.cpp"
