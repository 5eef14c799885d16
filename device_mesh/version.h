// The version of this library, for the preprocessor. Before 1.0 every minor version may
// change the interface.
#pragma once

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0
#define FSDP_VERSION "0.1.0"
