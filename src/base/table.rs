//! Names from a constant table.

/// Makes a constant array of the field `name` of each element of a constant slice. It is a macro,
/// because a constant expression cannot call a closure.
#[macro_export]
macro_rules! names {
    ($table:expr) => {{
        let mut names = [""; $table.len()];
        let mut index = 0;
        while index < names.len() {
            names[index] = $table[index].name;
            index += 1;
        }
        names
    }};
}
