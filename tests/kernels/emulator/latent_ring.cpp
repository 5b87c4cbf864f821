#define KERNEL attend_latent_ring
#define LAUNCHED_WARPS WARPS
#include "latent_ring.cu"
#include "launch.cpp"
