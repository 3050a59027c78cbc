"""The tests. What several of them share lies beside the tests that prove it; see CONTRIBUTING.md."""
