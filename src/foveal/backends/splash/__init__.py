"""Core attention on Tokamax's Splash Attention kernels for TPUs. Tokamax is not imported before it is used."""

from foveal.backends.splash.backend import Splash, SplashDynamic
from foveal.backends.splash.blocks import SplashBlocks

__all__ = ["Splash", "SplashBlocks", "SplashDynamic"]
