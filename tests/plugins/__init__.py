"""What every test run gets, as pytest plugins; tests/conftest.py loads them."""
