"""From a user's files to batches: paths, formats, fingerprints, token cache, bucketed batches.

A dataset is read once (`sources`), tokenised once (`tokens`), kept under its content hash
(`cache`) and served in length-bucketed batches (`batches`) by a thread (`prefetch`).
"""
