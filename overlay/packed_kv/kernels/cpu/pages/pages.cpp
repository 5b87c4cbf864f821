// The writer and the reader of a layout's pages, for store.py, gather.py and latent.py.
#include "gather.h"
#include "store.h"

EXPORT long pk_store_bytes() { return sizeof(Layer) + sizeof(Store); }
EXPORT long pk_gather_bytes() { return sizeof(Layer) + sizeof(Gather); }
