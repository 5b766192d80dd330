module firstlight.test/atls

go 1.19
