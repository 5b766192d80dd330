module firstlight.test/dial

go 1.19
