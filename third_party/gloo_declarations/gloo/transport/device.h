// gloo::transport::Device is held by pointer only, so the forward declaration in context.h is enough.
#pragma once

#include "gloo/context.h"
