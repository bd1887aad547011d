// Package manpages adds a command to a program that writes the program's man pages, or its page of the reference.
//
// Layer: library. Allowed imports: api.
package manpages

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Command returns the hidden command `man-pages FOLDER`. It writes one page for each command of the program into an
// existing folder. section is that of man: 1 for commands of users, 8 for daemons. The date of the pages is
// SOURCE_DATE_EPOCH, if the environment has it. With --markdown, it writes one page for all commands, PROGRAM.md.
func Command(section string) *cobra.Command {
	var markdown bool
	c := &cobra.Command{
		Use:    "man-pages FOLDER",
		Short:  "Write the man pages of this program",
		Args:   cobra.ExactArgs(1),
		Hidden: true,
		RunE: func(c *cobra.Command, args []string) error {
			root := c.Root()
			if markdown {
				return os.WriteFile(filepath.Join(args[0], root.Name()+".md"), Markdown(root), 0o644)
			}
			root.DisableAutoGenTag = true
			return doc.GenManTree(root, &doc.GenManHeader{Section: section, Source: "Capstan", Manual: "Capstan"}, args[0])
		},
	}
	c.Flags().BoolVar(&markdown, "markdown", false, "write one Markdown page for all commands instead")
	return c
}
