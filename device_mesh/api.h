// Marks what libfully_shard.so exports: what users call, and what templates of public
// headers call. Everything else in it is hidden.
//
//   class FSDP_API DeviceMesh;
//   FSDP_API DeviceMesh default_mesh();
#pragma once

#define FSDP_API [[gnu::visibility("default")]]
