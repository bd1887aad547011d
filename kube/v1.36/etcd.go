package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdctl/v3/ctlv3"
	etcdutlcmd "go.etcd.io/etcd/etcdutl/v3/etcdutl"
	"go.etcd.io/etcd/server/v3/etcdmain"
)

// etcdctl's package turns on prefix matching for every cobra command of the
// process ("kubectl de" would run "delete"), so it is off unless asked for.
func init() { cobra.EnablePrefixMatching = false }

func etcd() int {
	etcdmain.Main(os.Args)
	return 0
}

func etcdctl() int {
	cobra.EnablePrefixMatching = true
	ctlv3.MustStart()
	return 0
}

// etcdutl is the root command of go.etcd.io/etcd/etcdutl/v3, whose package main
// cannot be imported.
func etcdutl() int {
	cobra.EnablePrefixMatching = true
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
