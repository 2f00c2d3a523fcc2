def lint(*a): return []
def lint_text(*a): return []
