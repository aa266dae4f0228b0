"""From a user's files to batches.

A dataset is read once (`sources`), tokenised once (`tokens`), kept under its content hash (`cache`) and
served in length-bucketed batches (`batches`) that a thread makes ahead.
"""
