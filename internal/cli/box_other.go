//go:build !linux

package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"capstan.dev/capstan/internal/accessapi"
)

// Machines run on Linux hosts only. On other systems the command works through the API of a management cluster.

func (*app) boxFlags(*pflag.FlagSet) {}

func (*app) boxCommands() []*cobra.Command { return nil }

func (*app) boxHostCommands() []*cobra.Command { return nil }

func (*app) localServer() string { return "" }

func (*app) rootFlag() string { return "" }

func (*app) localKubeconfig() (string, error) {
	return "", coded{errors.New("expected the kubeconfig of a management cluster, found none: set --kubeconfig or $KUBECONFIG"), exitNotFound}
}

func (*app) planeHere() bool { return false }

func (a *app) localStatus(context.Context) error {
	_, err := a.localKubeconfig()
	return err
}

func (*app) hostHere() bool { return false }

func (*app) machineNamesHere(context.Context, string) []string { return nil }

func (*app) logsHere(context.Context, string, string, accessapi.LogOptions) error { return errNoHosts }

func (*app) shellHere(context.Context, string, string, []string) error { return errNoHosts }

func (*app) imageTargetsHere(context.Context, string, string) ([]imageTarget, error) {
	return nil, errNoHosts
}

var errNoHosts = coded{errors.New("expected a management cluster, found --socket: machines run on Linux hosts only; set --kubeconfig or $KUBECONFIG"), exitUsage}

func (*app) localVersions() ([]string, error) { return nil, nil }

func (*app) boxFiles(context.Context) (map[string][]byte, error) { return nil, nil }
