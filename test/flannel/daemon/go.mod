module capstan.dev/capstan/test/flannel/daemon

go 1.26.8

require github.com/flannel-io/flannel v0.28.10
