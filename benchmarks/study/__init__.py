"""Studies: arms x seeds, run from a checkout. `runner` runs them, `report` compares the arms.

python benchmarks/study/mask_effect.py --help     fine-tuning with and without the causal mask
python benchmarks/study/fusion.py --help          answers from several paraphrases
python benchmarks/study/future.py --help          Future Attention and its controls
"""
