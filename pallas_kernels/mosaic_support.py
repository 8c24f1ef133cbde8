"""The few places that depend on Mosaic GPU's moving API, and when a kernel can run at all."""

from jax._src import config as jax_config

from pallas_kernels.cards import CARDS, Card, current_card


def interpreting() -> bool:
    """Whether Pallas kernels are traced for GPU interpret mode on the CPU
    (`jax.experimental.pallas.mosaic_gpu.force_gpu_interpret_mode`)."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def mosaic_card() -> Card | str:
    """The card that a Mosaic kernel would run on now, or why there is none.

    In interpret mode there is no card: H100's limits stand in.
    """
    if interpreting():
        return CARDS["h100"]
    card = current_card()
    if isinstance(card, str):
        return f"needs an NVIDIA GPU of sm_80 or newer; this program is for {card}"
    return card
