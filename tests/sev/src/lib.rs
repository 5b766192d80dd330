//! Empty: this package only names the package that has the evidence.
