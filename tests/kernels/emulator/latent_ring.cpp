#define KERNEL attend_latent_ring
#define LAUNCHED_BLOCK attend_latent_ring_block
#define BEGINS_EARLY
#include "latent_ring.cu"
#include "launch.cpp"
