module capstan.dev/capstan/kube/multicall

go 1.26.0
