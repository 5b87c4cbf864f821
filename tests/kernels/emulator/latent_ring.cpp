#define KERNEL attend_latent_ring
#define LAUNCHED_WARPS WARPS
#define BEGINS_EARLY
#include "latent_ring.cu"
#include "launch.cpp"
