"""The Hub: models in, models out.

``client`` is the one seam to ``huggingface_hub``, which does all transfers; ``failures`` says in a sentence what went
wrong there, ``retries`` goes on after what passes by itself, ``publish`` makes one commit of what was converted.
"""
