// Tier 0. The only definition of the version. CMake reads it from here.
#pragma once

/// A part of the version MAJOR.MINOR.PATCH.
/// @{
#define DDPKIT_VERSION_MAJOR 0
#define DDPKIT_VERSION_MINOR 1
#define DDPKIT_VERSION_PATCH 0
/// @}

/// The version as a number: 100 for 0.1.0, 10203 for 1.2.3.
#define DDPKIT_VERSION (DDPKIT_VERSION_MAJOR * 10000 + DDPKIT_VERSION_MINOR * 100 + DDPKIT_VERSION_PATCH)
