// capstan-etcd is etcd with its two tools in one binary. The version is pinned here and not by a Kubernetes release, because
// a Kubernetes release keeps the etcd of its first day, and etcd corrects defects more often.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdctl/v3/ctlv3"
	etcdutlcmd "go.etcd.io/etcd/etcdutl/v3/etcdutl"
	"go.etcd.io/etcd/server/v3/etcdmain"

	"capstan.dev/capstan/kube/multicall"
)

func commands() multicall.Commands {
	return multicall.Commands{"etcd": etcd, "etcdctl": etcdctl, "etcdutl": etcdutl}
}

func main() {
	os.Exit(commands().Run(os.Stdout, os.Stderr))
}

func etcd() int {
	etcdmain.Main(os.Args)
	return 0
}

func etcdctl() int {
	ctlv3.MustStart()
	return 0
}

// etcdutl is the root command of go.etcd.io/etcd/etcdutl/v3, whose package main
// cannot be imported.
func etcdutl() int {
	root := &cobra.Command{Use: "etcdutl", Short: "An administrative command line tool for etcd3."}
	root.PersistentFlags().StringVarP(&etcdutlcmd.OutputFormat, "write-out", "w", "simple",
		"set the output format (fields, json, protobuf, simple, table)")
	root.AddCommand(
		etcdutlcmd.NewDefragCommand(),
		etcdutlcmd.NewSnapshotCommand(),
		etcdutlcmd.NewHashKVCommand(),
		etcdutlcmd.NewVersionCommand(),
		etcdutlcmd.NewCompletionCommand(),
		etcdutlcmd.NewMigrateCommand(),
	)
	root.SetHelpTemplate(`{{.UsageString}}`)
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		return 1
	}
	return 0
}
