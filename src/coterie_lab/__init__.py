"""The laboratory of coterie: the experiments of the papers, and benchmarks. Built on the library, never imported by it."""
