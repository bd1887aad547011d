package process

import (
	"fmt"
	"os/exec"
	"strconv"
	"testing"
)

func TestAllowedOOMScore(t *testing.T) {
	for name, test := range map[string]struct{ own, want, score int }{
		"PID 1 is exempt, a service is spared":     {-1000, -800, -800},
		"no child is exempt":                       {-1000, -1000, -800},
		"an ordinary child":                        {-1000, 0, 0},
		"PID 1 has no capability":                  {0, -999, 200},
		"it has none, and a pod's score is higher": {0, 900, 900},
		"it inherited a low score":                 {-900, -999, -700},
		"there is no higher score":                 {1000, 0, 1000},
	} {
		if got := allowedOOMScore(test.own, test.want); got != test.score {
			t.Errorf("%s: got %d, want %d", name, got, test.score)
		}
	}
}

// childrenDieFirst checks the scores in the kernel. With CAP_SYS_RESOURCE, PID 1 is exempt. Without it, the children have a
// higher score. The difference is the same.
func childrenDieFirst(r *Reaper) error {
	if err := ProtectInit(); err != nil {
		return err
	}
	own, err := oomScore("self")
	if err != nil {
		return err
	}
	cmd := exec.Command("/bin/cat")
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	exit, err := r.Start(cmd)
	if err != nil {
		return err
	}
	child, err := oomScore(strconv.Itoa(cmd.Process.Pid))
	if err != nil {
		return err
	}
	_ = input.Close()
	<-exit
	if want := max(0, own+aboveInit); child != want {
		return fmt.Errorf("PID 1 has the score %d and a child %d, want %d", own, child, want)
	}
	return nil
}
